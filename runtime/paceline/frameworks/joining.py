"""What every framework hands over: its model, optimizer and loader become those of the job.

A framework owns the training loop, so the job's engine stands behind the very objects that the loop
holds, as it does in a DDP script (D14). torch's world has one rank for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UnsupportedError, UsageError
from paceline.train import refusals
from paceline.train.ddp import ScriptOptimizer, check_model, put_to_sleep
from paceline.train.ddp_loader import ScriptLoader
from paceline.worker.state.optimizer_binding import SchedulerFactory

T = TypeVar("T")


class JobLoader(Generic[T]):
    """The job's loader in the place of the script's, as far as all frameworks look at one."""

    def __init__(self, loader: ScriptLoader[T]) -> None:
        self._loader = loader

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def sampler(self) -> Any:
        return self._loader.sampler


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    called: str,
    scheduler: SchedulerFactory | None,
    clip_norm: float | None,
    clip_value: float | None = None,
) -> None:
    """From now on `optimizer.step()` makes a round. `model` may be wrapped by DDP, which sleeps."""
    refusals.check_optimizer(optimizer, called)
    if isinstance(model, DistributedDataParallel):
        module = check_model(model)
        put_to_sleep(model)
    else:
        module = model
    ScriptOptimizer(
        optimizer,
        module,
        called=called,
        scheduler=scheduler,
        clip_norm=clip_norm,
        clip_value=clip_value,
    )


def check_epochs(epochs: object, said: str) -> int:
    """A whole number of epochs, 1 or more. `said`: how the script says it."""
    whole = isinstance(epochs, int) or (isinstance(epochs, float) and epochs.is_integer())
    if isinstance(epochs, bool) or not whole or cast("float", epochs) < 1:
        raise UsageError(
            f"{said}={epochs!r}", hint="give a whole number, 1 or more: the job deals the epochs"
        )
    return int(cast("float", epochs))


def refuse(given: Mapping[str, bool], hints: Mapping[str, str]) -> None:
    """UnsupportedError for the first of `given` that the script asks for; `hints` has each."""
    for name, asked in given.items():
        if asked:
            raise UnsupportedError(f"{name} is not supported in a job", hint=hints[name])


def check_alone(ranks: int, what: str) -> None:
    """UsageError unless torch's world is this process: what joins processes is the job."""
    if ranks != 1:
        raise UsageError(
            f"{what} sees {ranks} processes",
            hint="a job has one process group per rank: start the script with `paceline run`",
        )
