"""The parts of a DDP script that come before its call of `pl.ddp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BATCH, EPOCHS = 48, 4, 2


class Net(nn.Module):
    """A model with a layer that only every second forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 9)
        self.sometimes = nn.Linear(9, 9)
        self.last = nn.Linear(9, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.first(x))
        if self.calls % 2 == 0:
            hidden = hidden + self.sometimes(hidden)
        out: torch.Tensor = self.last(hidden)
        return out


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, x[:, :2] * 2 - 1)


def script_loader(**options: Any) -> DataLoader[Any]:
    samples = data()
    sampler: DistributedSampler[Any] = DistributedSampler(samples, seed=7)
    return DataLoader(samples, BATCH, sampler=sampler, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)
