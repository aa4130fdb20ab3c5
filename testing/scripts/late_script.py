"""A plain DDP script in which one random rank is late in each step.

Behind each step, each rank writes the sum of its weights, so that a test can compare them. Beside
the model it has one parameter for each sample of the run. Its gradient is 1 in the batch with this
sample. In the end it shows how often the sample was applied, and with which weight.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 480
BATCH = 8


class Model(torch.nn.Module):
    """A linear model, and a parameter for each sample of the run."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 1)
        self.counts = torch.nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, x: torch.Tensor, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prediction, and a term of the loss that counts the samples."""
        return self.linear(x), self.counts[samples].sum()


def main() -> None:
    """Train, and write the sums and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clip", action="store_true", help="clipped AdamW in place of momentum")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-ms", type=float, default=20.0)
    parser.add_argument("--late-ms", type=float, default=60.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    inputs = torch.randn(SAMPLES, 16)
    targets = inputs @ torch.randn(16, 1) + 0.1 * torch.randn(SAMPLES, 1)
    data = TensorDataset(inputs, targets, torch.arange(SAMPLES))
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, BATCH, sampler=sampler)
    model = DistributedDataParallel(Model(SAMPLES * args.epochs))
    weights = list(model.module.linear.parameters())
    counter = torch.optim.SGD([model.module.counts], lr=1.0)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(weights, lr=0.05)
        if args.clip
        else torch.optim.SGD(weights, lr=0.02, momentum=0.9)
    )
    step = 0
    with (args.out / f"steps.{rank}").open("a") as sums:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for x, y, samples in loader:
                optimizer.zero_grad()
                counter.zero_grad()
                output, counted = model(x, samples + SAMPLES * epoch)
                loss = mse_loss(output, y) + counted
                time.sleep(args.work_ms / 1000)
                if random.Random(epoch * 1000 + step).randrange(size) == rank:
                    time.sleep(args.late_ms / 1000)
                loss.backward()
                if args.clip:
                    torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                counter.step()
                step += 1
                total = sum(p.detach().double().sum().item() for p in weights)
                sums.write(f"{epoch} {total!r}\n")
                sums.flush()
    torch.save(model.module.counts.detach(), args.out / f"counts.{rank}.pt")
    with torch.no_grad():
        loss = mse_loss(model.module.linear(inputs), targets)
    if rank == 0:
        sys.stdout.write(f"loss {loss.item():.6f}\n")


main()
