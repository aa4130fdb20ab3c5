"""The digits with emulated step times: what the programs of each system have in common.

Model, data and batches are those of examples/digits; a step takes as long as the load says, what it
computes included.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from paceline.core.loads import LOADS
from torch import nn

CONFIG: dict[str, Any] = json.loads(os.environ.get("BENCHMARK", "{}"))
BATCH: Final = 32
RATE: Final = 0.05
MOMENTUM: Final = 0.9
WATCH_S: Final = 0.25
"""Weights are kept that often, and judged after the end: judging costs no system anything."""


def example() -> Any:
    """examples/digits/train.py as a module."""
    path = Path(__file__).parent.parent / "examples" / "digits" / "train.py"
    spec = importlib.util.spec_from_file_location("digits_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()


class Pace:
    """Makes the steps of a plain program as long as `--inject slow:load=...` would."""

    def __init__(self, rank: int) -> None:
        self._rank, self._step = rank, 0
        self.begin()

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        load = LOADS[CONFIG["load"]]
        drawn_ns = load.draw_ns(seed=CONFIG["seed"], rank=self._rank, step=self._step)
        self._step += 1
        left_s = CONFIG["scale"] * drawn_ns / 1e9 - (time.monotonic() - self._since)
        time.sleep(max(0.0, left_s))


def batches(rank: int, ranks: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`count` batches of a rank that has every `ranks`-th image of each shuffled epoch."""
    training, _, _ = example().load_data()
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
    """The weights of a model as time passes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: list[tuple[float, dict[str, torch.Tensor]]] = []
        self._began = self._next = 0.0

    def look(self) -> None:
        """Between two steps. The first look is the beginning."""
        now = time.monotonic()
        self._began = self._began or now
        if now >= self._next:
            state = {name: value.clone() for name, value in self._model.state_dict().items()}
            self._kept.append((now - self._began, state))
            self._next = now + WATCH_S

    def judge(self) -> dict[str, Any]:
        """Seconds and accuracies over time, and at the end; changes the model's weights."""
        ended_s = time.monotonic() - self._began
        digits = example()
        _, images, labels = digits.load_data()
        final = digits.accuracy(self._model, images, labels)
        curve = []
        for seconds, state in self._kept:
            self._model.load_state_dict(state)
            curve.append((seconds, digits.accuracy(self._model, images, labels)))
        return {"seconds": ended_s, "accuracy": final, "curve": curve}
