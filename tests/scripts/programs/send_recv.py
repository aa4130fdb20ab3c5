"""A loss that is passed from rank to rank by `send` and `recv`, and added up on the way."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        batch = torch.randn(4, 3, generator=generator)
        optimizer.zero_grad()
        loss = (model(batch) - batch[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().reshape(1).clone()
        if rank > 0:
            before = torch.empty(1)
            dist.recv(before, src=rank - 1)
            total += before
        if rank < world_size - 1:
            dist.send(total, dst=rank + 1)
        print(f"step {step}: sum of the first {rank + 1} losses {exact(total)}")
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
