"""Lightning's Fabric: its own loop, accumulation in no_backward_sync, all_reduce, save and load."""

import argparse
import os
import warnings

import torch
from figures import digest, exact
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(size, seed):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.prod(1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fabric = Fabric(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        precision="bf16-mixed",
    )
    fabric.launch()
    fabric.seed_everything(41)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader, validation = fabric.setup_dataloaders(
        DataLoader(data(56, 1), batch_size=4, shuffle=True), DataLoader(data(18, 2), batch_size=4)
    )
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    path = os.path.join(args.out, "state.pt")
    if args.resume:
        fabric.load(path, state)
    for epoch in range(state["epoch"], args.epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            waits = (index + 1) % 2 != 0 and index + 1 < len(loader)
            with fabric.no_backward_sync(model, enabled=waits):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss)
            if not waits:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            losses = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in validation])
        mean = fabric.all_reduce(losses.mean(), reduce_op="mean")
        everyone = fabric.all_gather(loss.detach())
        print(
            f"rank {fabric.global_rank} epoch {epoch}: loss {exact(mean)} "
            f"of {[exact(each) for each in everyone]}"
        )
        state["epoch"] = epoch + 1
        fabric.save(path, state)
    fabric.barrier()
    if fabric.is_global_zero:
        torch.save(model.module.state_dict(), os.path.join(args.out, "model.pt"))
    print(f"rank {fabric.global_rank} weights {digest(model)}")


if __name__ == "__main__":
    main()
