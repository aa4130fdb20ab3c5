"""Metrics over groups made by `new_group`: of all ranks, and of each rank alone."""

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
    mine = [dist.new_group([member]) for member in range(world_size)][rank]
    whole = dist.new_group(backend="gloo")
    torch.manual_seed(rank)
    model = DDP(nn.Linear(4, 4), process_group=whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        alone, everywhere = loss.detach().clone(), loss.detach().clone()
        dist.all_reduce(alone, group=mine)
        dist.all_reduce(everywhere, group=whole)
        size = dist.get_world_size(mine)
        print(f"rank {rank} step {step}: {exact(alone / size)} {exact(everywhere / world_size)}")
        dist.barrier(group=mine)
    print(
        f"rank {rank} is {dist.get_group_rank(mine, rank)} of {dist.get_process_group_ranks(mine)}"
    )
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
