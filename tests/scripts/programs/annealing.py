"""Numbers that follow from themselves in each step, after a look at the first batch."""

import argparse
import itertools
import math
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Gate(nn.Module):
    """A soft choice whose temperature falls with each training pass."""

    passes = 0

    def __init__(self, size):
        super().__init__()
        self.choice = nn.Linear(size, size)
        self.temperature = 2.0

    def forward(self, x):
        if self.training:
            Gate.passes += 1
            self.temperature = max(self.temperature * 0.95, 0.1)
        return x * torch.softmax(self.choice(x) / self.temperature, dim=-1)


def warm_restarts(rate, length):
    """Yield a rate for each step."""
    at = 0
    while True:
        yield rate * (1 + math.cos(math.pi * at / length)) / 2
        at = (at + 1) % length


def momentum_schedule(low, high, steps):
    step = 0

    def momentum():
        nonlocal step
        step += 1
        return low + (high - low) * min(1.0, step / steps)

    return momentum


def noisy(x, scale):
    noisy.calls += 1
    return x + scale * torch.sin(noisy.calls * x)


noisy.calls = 0


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    x = torch.randn(args.samples, 6)
    data = TensorDataset(x, 0.5 * x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    inputs, _ = next(iter(loader))
    print(f"rank {rank} batches of {tuple(inputs.shape)}")
    model = DDP(nn.Sequential(Gate(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    rates, momentum = warm_restarts(args.lr, 12), momentum_schedule(0.5, 0.9, 30)
    scales = iter([0.5 * 0.97**number for number in range(1000)])
    numbers = itertools.count(1)
    beta = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, batches = torch.zeros(()), 0
        for x, y in loader:
            number = next(numbers)
            for group in optimizer.param_groups:
                group["lr"], group["momentum"] = next(rates) / math.sqrt(number), momentum()
            beta = min(1.0, beta + 0.04)
            loss = nn.functional.mse_loss(model(noisy(x, next(scales))), y)
            penalty = sum(p.square().sum() for p in model.parameters())
            optimizer.zero_grad()
            (loss + 1e-3 * beta * penalty).backward()
            optimizer.step()
            total += loss.detach()
            batches += 1
        print(f"rank {rank} epoch {epoch} loss {exact((total / batches).item())}")
    gate = model.module[0]
    carried = f"{number} {noisy.calls} {Gate.passes} {exact(beta)} {exact(gate.temperature)}"
    print(f"rank {rank} carried {carried}")
    of_all = [""] * dist.get_world_size()
    dist.all_gather_object(of_all, carried)
    assert len(set(of_all)) == 1, of_all
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.out, "weights.pt"))
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
