"""`python -m benchmarks.gpu.compiled DEVICE HOW`: a compiled model trains as the plain one does.

It trains a model with plain torch and then again in a job of one rank, compiled in one of the ways
of docs/gpu.md. It prints the largest difference of the weights, divided by the largest change of a
weight.
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
    """Return the model with forward and backward as CUDA graphs; without a GPU, unchanged."""
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
"""Ways to compile a model, by name."""


def make(device: torch.device) -> nn.Module:
    """Return the model on a device; the seed is fixed."""
    torch.manual_seed(1)
    layers = (layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return nn.Sequential(*layers).to(device)


def train(model: nn.Module, called: Any, optimizer: Any, steps: Iterable[int]) -> list[Any]:
    """Train for some steps and return a copy of the weights."""
    device = next(model.parameters()).device
    dice = torch.Generator().manual_seed(2)
    batches = torch.randn(BATCHES, 32, WIDTH, generator=dice).to(device)
    for step in steps:
        called(batches[step % BATCHES]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def main(device: torch.device, how: str) -> None:
    """Train the plain and the compiled model and print their difference."""
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
