"""The emulated model for rivals that hook into torch's autograd: its backward is the device's.

It is used in the rivals' environments, so it imports nothing but torch and the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.rivals.rank import RATE, Device


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor, model: Emulated, index: int) -> Any:
        ctx.model, ctx.index = model, index
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        model, index = ctx.model, ctx.index
        model.device.backward()
        if index == 0:
            model.device.end()
        return gradient, model.gradients[index], None, None


class Emulated(torch.nn.Module):
    """Chain of tensors; each has a gradient of ones, which becomes ready in the device's time."""

    device: Device

    def __init__(self, tensors: Sequence[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(elements) for elements in tensors)
        ones = torch.ones(max(tensors))
        self.gradients = [ones[:elements] for elements in tensors]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the forward pass on the emulated device."""
        self.device.forward()
        for index, weight in enumerate(self.layers):
            x = _Layer.apply(x, weight, self, index)
        return x


class TorchTrainer:
    """Training loop of a plain script: zero_grad, backward, step."""

    def __init__(
        self,
        tensors: Sequence[int],
        wrap: Callable[[torch.nn.Module], torch.nn.Module],
        make: Callable[[torch.optim.Optimizer, torch.nn.Module], Any] = lambda inner, _: inner,
    ) -> None:
        torch.set_num_threads(1)
        self.model = Emulated(tensors)
        self.wrapped = wrap(self.model)
        inner = torch.optim.SGD(self.model.parameters(), lr=RATE, fused=True)
        self.optimizer = make(inner, self.model)
        self._x = torch.ones(1, requires_grad=True)

    def step(self) -> None:
        """Run one step."""
        self.optimizer.zero_grad()
        self.wrapped(self._x).sum().backward()
        self.optimizer.step()

    def train(self, device: Device, steps: int) -> None:
        """Run steps on an emulated device."""
        self.model.device = device
        for _ in range(steps):
            self.step()

    def corners(self) -> tuple[float, float]:
        """Return the first and the last weight."""
        layers = self.model.layers
        return float(layers[0].detach()[0]), float(layers[len(layers) - 1].detach()[-1])
