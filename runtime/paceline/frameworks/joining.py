"""Code that all frameworks share: their model, optimizer and loader become those of the job.

A framework owns the training loop. The very objects that the loop holds therefore forward to the
job's engine, as they do in a DDP script (D14). Each rank sees a torch world of one rank.
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
    """Stand-in for the script's loader, with the attributes that all frameworks read.

    Args:
        loader: The job's loader.
    """

    def __init__(self, loader: ScriptLoader[T]) -> None:
        self._loader = loader

    @property
    def dataset(self) -> Any:
        """Data set of the script's loader."""
        return self._loader.dataset

    @property
    def sampler(self) -> Any:
        """Sampler of the script's loader; the job decides the order."""
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
    """Make `optimizer.step()` a round of the job, from now on.

    Args:
        model: The model; if it is wrapped by DDP, DDP's reduction is switched off.
        optimizer: The optimizer that the framework holds.
        called: Name of what the script has called; used in hints.
        scheduler: As for `pl.DistributedOptimizer`.
        clip_norm: As for `pl.DistributedOptimizer`.
        clip_value: As for `pl.DistributedOptimizer`.
    """
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
    """Return the number of epochs as an int.

    Args:
        epochs: What the script has given; a float such as 3.0 is accepted.
        said: The argument's name in the script; used in the error.

    Returns:
        A whole number, 1 or more.

    Raises:
        UsageError: It is anything else.
    """
    whole = isinstance(epochs, int) or (isinstance(epochs, float) and epochs.is_integer())
    if isinstance(epochs, bool) or not whole or cast("float", epochs) < 1:
        raise UsageError(
            f"{said}={epochs!r}", hint="give a whole number, 1 or more: the job deals the epochs"
        )
    return int(cast("float", epochs))


def refuse(given: Mapping[str, bool], hints: Mapping[str, str]) -> None:
    """Refuse the first option that the script uses and that a job cannot honor.

    Args:
        given: For each option, whether the script uses it.
        hints: For each option, what to do instead.

    Raises:
        UnsupportedError: The script uses one of them.
    """
    for name, asked in given.items():
        if asked:
            raise UnsupportedError(f"{name} is not supported in a job", hint=hints[name])


def check_alone(ranks: int, what: str) -> None:
    """Check that torch's world is this process alone: the job joins the processes.

    Args:
        ranks: Number of processes that the framework sees.
        what: The object that sees them; it begins the error message.

    Raises:
        UsageError: There is more than one.
    """
    if ranks != 1:
        raise UsageError(
            f"{what} sees {ranks} processes",
            hint="a job has one process group per rank: start the script with `paceline run`",
        )
