"""The limit instead of a rival: the same steps with nothing summed, each rank for itself.

`alone torch` is the loop of the rivals that hook into torch's autograd; `alone bare` is that of the
others. The mean of equal gradients is each of them, so the weights count as many as if all were
applied.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.rivals.rank import RATE, Array, System, Trainer


class Alone(System):
    """System whose ranks do not communicate."""

    def __init__(self, loop: str) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._loop = loop

    def allreduce(self, buffer: Array) -> None:
        """Return at once: there is nothing to sum and nothing to wait for."""

    def trainer(self, tensors: Sequence[int]) -> Any:
        """Return the loop that the arguments name."""
        if self._loop == "bare":
            return Bare(self, tensors)
        return _torch_loop(tensors)


class Bare(Trainer):
    """Loop without torch and without a sum."""

    def update(self) -> None:
        """Apply plain SGD with the rank's own gradient."""
        np.multiply(self.flat, RATE, out=self.flat)
        np.subtract(self.weights, self.flat, out=self.weights)


def _torch_loop(tensors: Sequence[int]) -> Any:
    """Return the loop of a plain torch script, without a sum."""
    from benchmarks.rivals.emulated import TorchTrainer

    class Kept(TorchTrainer):
        """Loop whose gradients keep their memory, as in the buckets of the rivals.

        New pages in each step would cost more than a sum.
        """

        def step(self) -> None:
            self.optimizer.zero_grad(set_to_none=False)
            self.wrapped(self._x).sum().backward()
            self.optimizer.step()

    return Kept(tensors, lambda model: model)


def make(words: list[str]) -> System:
    """Return the system; the first argument names the loop."""
    return Alone(words[0])
