"""Model, death and progress lines of B8, the same for all systems that are compared.

The scripts of all systems use this module, so it imports nothing but torch. Every process appends a
line per finished step: monotonic nanoseconds, number of the step, and processes that took part. The
victim writes the time of its death by both clocks before it kills itself.
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
    """Return a model of about a million parameters: 4 MB of weights and as much of momentum."""
    torch.manual_seed(0)
    width = int(CONFIG["width"])
    return torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 64)
    )


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a batch that depends on the step only, after sleeping `step_ms`."""
    dice = torch.Generator().manual_seed(step)
    x = torch.randn(16, 64, generator=dice)
    time.sleep(CONFIG["step_ms"] / 1000)
    loss: torch.Tensor = (model(x) - x).square().mean()
    return loss


class Progress:
    """Progress file of one process."""

    def __init__(self, name: str) -> None:
        self._file = (FOLDER / f"progress-{name}-{os.getpid()}").open("a", buffering=1)

    def tell(self, step: int, taking_part: int) -> None:
        """Append a line for a finished step."""
        self._file.write(f"{time.monotonic_ns()} {step} {taking_part}\n")


def perhaps_die(place: int, step: int) -> None:
    """Kill this process with SIGKILL, once, if it is the victim (place 1) and at step `die_at`."""
    if place != 1 or step < CONFIG["die_at"] or DEATH.exists():
        return
    DEATH.write_text(json.dumps({"ns": time.monotonic_ns(), "wall_s": time.time()}))
    os.kill(os.getpid(), signal.SIGKILL)
