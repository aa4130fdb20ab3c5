"""A GradScaler in use, and a gradient that is not finite on one rank in one step.

The infinity must reach every rank with the average, so that all skip the same step and lower their
scale.
"""

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
    rank = dist.get_rank()
    torch.manual_seed(71)
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        x = torch.randn(4, 3, generator=generator)
        if step == 3 and rank == dist.get_world_size() - 1:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        finite = all(p.grad.isfinite().all().item() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        scale = exact(scaler.get_scale())
        print(f"rank {rank} step {step}: loss {exact(loss)} scale {scale} finite {finite}")
    if rank == 0:
        state = {"model": model.state_dict(), "scaler": scaler.state_dict()}
        torch.save(state, f"{args.out}/state.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
