"""Branches of a model that some steps, or some ranks in a step, do not use.

A parameter that one rank has used gets an average on all; one that no rank has used keeps None, so
that an optimizer with momentum leaves it alone.
"""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Branches(nn.Module):
    """A trunk and three branches, of which each forward pass uses one."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 1) for _ in range(3)])

    def forward(self, x, branch):
        return self.branches[branch](torch.tanh(self.trunk(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(41)
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        branch = 0 if step < 2 else (step + rank) % 2  # nobody ever uses the third one
        x = torch.randn(4, 4, generator=generator)
        optimizer.zero_grad()
        loss = (model(x, branch) - x[:, :1]).square().mean()
        loss.backward()
        have = [each.weight.grad is not None for each in model.module.branches]
        optimizer.step()
        print(f"rank {rank} step {step}: branch {branch} loss {exact(loss)} gradients {have}")
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
