"""ReduceLROnPlateau and early stopping, both decided by a validation loss of all ranks."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def validate(model, loader):
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            sums += torch.tensor([nn.functional.l1_loss(model(x), y, reduction="sum"), len(x)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    x = torch.randn(60, 4)
    y = x @ torch.randn(4, 1) + 0.3 * torch.randn(60, 1)
    train, val = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])
    loader = DataLoader(train, 5, sampler=DistributedSampler(train))
    val_loader = DataLoader(val, 5, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    best, bad_epochs = float("inf"), 0
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        loss = validate(model, val_loader)
        scheduler.step(loss)
        print(f"epoch {epoch}: val {exact(loss)} lr {exact(optimizer.param_groups[0]['lr'])}")
        if loss < best:
            best, bad_epochs = loss, 0
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), f"{args.out}/best.pt")
        else:
            bad_epochs += 1
        stop = torch.tensor(int(bad_epochs >= args.patience))
        dist.broadcast(stop, src=0)
        if stop.item():
            print(f"early stop after epoch {epoch}")
            break
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
