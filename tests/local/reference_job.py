"""The parts that a job and its hand-written reference share: model, data, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import torch

Scheduler = torch.optim.lr_scheduler.LRScheduler


def make_model(hidden: int, dtype: str) -> torch.nn.Module:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 3)
    )
    return model.to(getattr(torch, dtype))


def make_data(samples: int) -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(11)
    inputs = torch.randn(samples, 6, generator=draw)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].sin() * 3)


def make_optimizer(name: str, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def make_scheduler(wanted: bool) -> Callable[[torch.optim.Optimizer], Scheduler] | None:
    if not wanted:
        return None
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, wanted = batch
    made = model(inputs.to(next(model.parameters()).dtype))
    return torch.nn.functional.mse_loss(made, wanted.to(made.dtype))


def digest_of(model: torch.nn.Module) -> str:
    """Return a hash of the exact bits of the weights."""
    parameters = [p.detach().reshape(-1) for p in model.parameters()]
    return blake2b(
        torch.cat(parameters).view(torch.uint8).numpy().tobytes(), digest_size=16
    ).hexdigest()
