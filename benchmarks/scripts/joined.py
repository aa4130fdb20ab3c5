"""B13: a large model whose steps cost little more than their sums; it writes when each step ended.

joined.py FOLDER PARAMETERS STEPS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LAYERS = 25


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.numel = weight.numel()
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.full((ctx.numel,), 1e-3)


class Large(nn.Module):
    """Layers with many parameters, which are added to the input."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(parameters // LAYERS) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the input and of one element of each layer."""
        for weight in self.layers:
            x = _Add.apply(x, weight)
        return x.sum()


def main() -> None:
    """Train, and note the end of each step."""
    folder, parameters, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Large(parameters), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    data = TensorDataset(torch.ones(size * steps, 4))
    loader = DataLoader(data, 1, sampler=DistributedSampler(data, shuffle=False))
    with (folder / f"steps-{rank}-{os.getpid()}").open("w", buffering=1) as out:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            out.write(f"{time.monotonic_ns()}\n")
    total = sum(float(weight.detach().double().sum()) for weight in model.module.layers)
    (folder / f"sum-{rank}").write_text(json.dumps(total))


main()
