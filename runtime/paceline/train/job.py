"""What a script asks about its job, and tells it, beside training itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.core.protocol.progress import Progress
from paceline.errors import UsageError
from paceline.train.context import current


def rank() -> int:
    """Index of this process in the present membership; changes when ranks come and go (D12).

    Before training starts: replica x procsPerReplica + process. Seed with it what ranks shall draw
    differently."""
    return current("rank()").session.rank


def size() -> int:
    """Number of ranks in the present membership; before training starts, of those wanted."""
    return current("size()").session.size


def progress() -> Progress:
    """How far the job is: `step`, `epoch`, `samples`. For the loop of a rank that comes late."""
    context = current("progress()")
    if context.optimizer is None or not context.optimizer.started:
        raise UsageError(
            "progress() before training has started: this rank does not know the job yet",
            hint="call it inside the loop over loader.epochs() or pl.steps()",
        )
    return context.session.progress


def is_publisher() -> bool:
    """True on exactly one rank, the one that writes results and files for all.

    Which one it is may change when ranks come and go; a rank whose loop has ended is it only when
    all are. Before training starts it is rank 0, and a rank that is started again is not."""
    return current("is_publisher()").session.is_publisher


def log(name: str, value: float | torch.Tensor, weight: float = 1.0) -> None:
    """Report a figure of this step; the job shows the weighted mean over all ranks (D11).

    It travels with the step's announcement, so it counts exactly when its gradient does."""
    current("log()").log(name, value, weight)


@contextmanager
def evaluating() -> Iterator[None]:
    """Do something long on this rank, such as a validation, without holding up the others.

    Leases go back, and the rank counts as idle until the end of the block; afterwards the model
    holds the newest weights. In mode Full, where each round has all ranks, the others wait for it
    instead, up to `benchAfter`: evaluation that every rank makes is a common pause."""
    context = current("evaluating()")
    optimizer = context.optimizer
    if optimizer is None or not optimizer.started or optimizer.stopped or context.finished:
        yield
        return
    optimizer.builder.must_be_idle("evaluating()")
    context.session.flush()
    context.session.rest()
    optimizer.after_parking()
    yield
    context.session.resume()
    optimizer.after_parking()


def finish() -> None:
    """End of training for a script with a loop of its own; `loader.epochs()` does it by itself.

    Copies the final weights into the model and waits until the job is released (D7)."""
    current("finish()").finish()


def stop() -> None:
    """End the job here, before its plan is worked off: one rank that says so stops all.

    The job is complete with the next round, on every rank with the same version. Copies the final
    weights into the model and waits until the job is released, as `finish()` does; a rank that has
    called it publishes. The loops of the other ranks (`loader.epochs()`, `pl.steps()`) end by
    themselves. Call it between `step()` and the next `backward()`."""
    current("stop()").stop()
