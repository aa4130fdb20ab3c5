"""Common parts of the digits programs of each system, with emulated step times.

Model, data and batches are those of examples/digits. The load gives the length of a step, which
includes the time that the step computes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
from paceline.core.loads import LOADS
from torch import nn

from benchmarks.jobs import example

CONFIG: dict[str, Any] = json.loads(os.environ.get("BENCHMARK", "{}"))
BATCH: Final = 32
RATE: Final = 0.05
MOMENTUM: Final = 0.9
WATCH_S: Final = 0.25
"""Seconds between two copies of the weights. They are judged after the end, so judging costs no
system time."""


def make_model() -> nn.Module:
    """Return the model; the seed is fixed, so each rank has the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compute the gradients of one batch."""
    nn.functional.cross_entropy(model(x), y).backward()


class Pace:
    """Stretches the steps of a plain program as `--inject slow:load=...` would."""

    def __init__(self, rank: int) -> None:
        self._rank, self._step = rank, 0
        self.begin()

    def begin(self) -> None:
        """Start the clock of a step."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Sleep until the step has the length that the load gives."""
        load = LOADS[CONFIG["load"]]
        drawn_ns = load.draw_ns(seed=CONFIG["seed"], rank=self._rank, step=self._step)
        self._step += 1
        left_s = CONFIG["scale"] * drawn_ns / 1e9 - (time.monotonic() - self._since)
        time.sleep(max(0.0, left_s))


def batches(rank: int, ranks: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw the batches of one rank.

    Args:
        rank: Rank of the caller.
        ranks: World size; a rank gets every `ranks`-th image of each shuffled epoch.
        count: Number of batches.

    Yields:
        Images and labels of BATCH examples each.
    """
    training, _, _ = example("digits").load_data()
    images, labels = training.tensors
    epoch, left = 0, torch.empty(0, dtype=torch.int64)
    for _ in range(count):
        while len(left) < BATCH:
            dice = torch.Generator().manual_seed(1000 * CONFIG["seed"] + epoch)
            left = torch.cat([left, torch.randperm(len(labels), generator=dice)[rank::ranks]])
            epoch += 1
        now, left = left[:BATCH], left[BATCH:]
        yield images[now], labels[now]


class Curve:
    """Copies of a model's weights over time, from which the accuracy is computed at the end."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: list[tuple[float, dict[str, torch.Tensor]]] = []
        self._began = self._next = 0.0

    def look(self) -> None:
        """Copy the weights if it is time for it; call it between two steps.

        The first call starts the clock.
        """
        now = time.monotonic()
        self._began = self._began or now
        if now >= self._next:
            state = {name: value.clone() for name, value in self._model.state_dict().items()}
            self._kept.append((now - self._began, state))
            self._next = now + WATCH_S

    def judge(self) -> dict[str, Any]:
        """Compute the accuracy over time and at the end; this overwrites the model's weights.

        Returns:
            `seconds` of the whole run, the final `accuracy`, and `curve` as pairs of seconds and
            accuracy.
        """
        ended_s = time.monotonic() - self._began
        digits = example("digits")
        _, images, labels = digits.load_data()
        final = digits.accuracy(self._model, images, labels)
        curve = []
        for seconds, state in self._kept:
            self._model.load_state_dict(state)
            curve.append((seconds, digits.accuracy(self._model, images, labels)))
        return {"seconds": ended_s, "accuracy": final, "curve": curve}
