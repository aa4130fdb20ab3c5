"""`python -m benchmarks.gpu.compiled DEVICE HOW`: a compiled model trains as the plain one does.

Trains a model with plain torch and then again in a job of one rank, compiled in one of the ways of
docs/gpu.md; prints the largest difference of the weights, over the largest change of a weight.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import paceline as pl
import torch
from torch import nn

STEPS: Final = 20
BATCHES: Final = 4
WIDTH: Final = 256


def graphed(model: nn.Module) -> Any:
    """Forward and backward as CUDA graphs; where there is no GPU, as they are."""
    example = next(model.parameters()).new_ones(32, WIDTH)
    if not example.is_cuda:
        return model
    return torch.cuda.make_graphed_callables(model, (example,))


HOW: Final[Mapping[str, Callable[[nn.Module], Any]]] = {
    "as it is": lambda model: model,
    "torch.compile": torch.compile,
    "torch.compile, reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "make_graphed_callables": graphed,
}


def make(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    layers = (layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return nn.Sequential(*layers).to(device)


def train(model: nn.Module, called: Any, optimizer: Any, steps: Iterable[int]) -> list[Any]:
    device = next(model.parameters()).device
    dice = torch.Generator().manual_seed(2)
    batches = torch.randn(BATCHES, 32, WIDTH, generator=dice).to(device)
    for step in steps:
        called(batches[step % BATCHES]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def main(device: torch.device, how: str) -> None:
    plain = make(device)
    began = [parameter.detach().clone() for parameter in plain.parameters()]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    wanted = train(plain, plain, optimizer, range(STEPS))

    pl.init()
    model = make(device)
    called = HOW[how](model)
    own = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    got = train(model, called, own, pl.steps(STEPS))
    moved = max(float((a - b).abs().max()) for a, b in zip(wanted, began, strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(wanted, got, strict=True))
    print(json.dumps(apart / moved))


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), sys.argv[2])
