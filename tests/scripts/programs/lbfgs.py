"""L-BFGS, whose step calls a closure with forward and backward several times.

Each rank holds its part of the samples. Losses are averaged in the closure, so that all ranks take
the same decisions in the line search.
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
    torch.manual_seed(12)
    x = torch.linspace(-2, 2, 40)[:, None]
    y = torch.sin(2 * x)
    x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in (x, y))
    model = DDP(nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double())
    x, y = x.double(), y.double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    for step in range(4):
        loss = optimizer.step(closure)
        print(f"step {step}: loss {exact(loss)} after {calls} calls")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
