"""Accumulation over several batches in `no_sync()`, with a remainder at the end of each epoch."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--accumulate", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(17)
    data = TensorDataset(torch.randn(80, 5), torch.randn(80, 1))
    loader = DataLoader(data, 5, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    updates = 0
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            update = (i + 1) % args.accumulate == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if update else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / args.accumulate
                loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
        print(f"epoch {epoch}: {updates} updates, loss {exact(loss)}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
