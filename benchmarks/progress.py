"""B8's common ground: one model, one way to die, one way to say how far training has come.

Used by the scripts of all systems that are compared, so it imports nothing but torch. Every process
appends a line per finished step: monotonic nanoseconds, number of the step, processes that took
part. The process that is to die writes its last words first: both clocks.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = json.loads(os.environ["RECOVERY"])
FOLDER = Path(CONFIG["folder"])
DEATH = FOLDER / "death.json"


def make_model() -> torch.nn.Module:
    """About a million parameters: 4 MB of weights and as much of momentum."""
    torch.manual_seed(0)
    width = int(CONFIG["width"])
    return torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 64)
    )


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Of a batch that depends on the step only; takes `step_ms`."""
    dice = torch.Generator().manual_seed(step)
    x = torch.randn(16, 64, generator=dice)
    time.sleep(CONFIG["step_ms"] / 1000)
    loss: torch.Tensor = (model(x) - x).square().mean()
    return loss


class Progress:
    """Of one process."""

    def __init__(self, name: str) -> None:
        self._file = (FOLDER / f"progress-{name}-{os.getpid()}").open("a", buffering=1)

    def tell(self, step: int, taking_part: int) -> None:
        self._file.write(f"{time.monotonic_ns()} {step} {taking_part}\n")


def perhaps_die(place: int, step: int) -> None:
    """kill -9 of the process in place 1, once, when it has come so far."""
    if place != 1 or step < CONFIG["die_at"] or DEATH.exists():
        return
    DEATH.write_text(json.dumps({"ns": time.monotonic_ns(), "wall_s": time.time()}))
    os.kill(os.getpid(), signal.SIGKILL)
