"""No rival but the limit: the same steps with nothing summed, each rank for itself.

`alone torch`: the loop of those that hook into torch's autograd; `alone bare`: that of the others.
The mean of equal gradients is each of them, so the weights count as many as if all were applied.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.rivals.rank import RATE, Array, System, Trainer


class Alone(System):
    def __init__(self, loop: str) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._loop = loop

    def allreduce(self, buffer: Array) -> None:
        """Nothing to wait for, either."""

    def trainer(self, tensors: Sequence[int]) -> Any:
        if self._loop == "bare":
            return Bare(self, tensors)
        return _torch_loop(tensors)


class Bare(Trainer):
    def update(self) -> None:
        np.multiply(self.flat, RATE, out=self.flat)
        np.subtract(self.weights, self.flat, out=self.weights)


def _torch_loop(tensors: Sequence[int]) -> Any:
    from benchmarks.rivals.emulated import TorchTrainer

    class Kept(TorchTrainer):
        """Gradients keep their memory, as they do in the buckets of those that sum them: new pages
        in each step would cost more than a sum."""

        def step(self) -> None:
            self.optimizer.zero_grad(set_to_none=False)
            self.wrapped(self._x).sum().backward()
            self.optimizer.step()

    return Kept(tensors, lambda model: model)


def make(words: list[str]) -> System:
    return Alone(words[0])
