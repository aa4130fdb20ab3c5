"""Functions by which a script queries its job and reports to it, besides training itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.core.protocol.progress import Progress
from paceline.errors import UsageError
from paceline.train.context import current


def rank() -> int:
    """Return the index of this process in the present membership; it may change (D12).

    Before training starts it is replica x procsPerReplica + process. Use it as a seed for what each
    rank shall draw differently.

    Returns:
        An index from 0 to `size()` - 1.
    """
    return current("rank()").session.rank


def size() -> int:
    """Return the number of ranks in the present membership; before training, of those intended.

    Returns:
        The world size. It changes when ranks join or leave.
    """
    return current("size()").session.size


def progress() -> Progress:
    """Return how far the job is, for the loop of a rank that joins late.

    Returns:
        The job's `step`, `epoch` and `samples`, for the weights that the model holds.

    Raises:
        UsageError: Training has not started, so this rank does not know the job's progress yet.
    """
    context = current("progress()")
    if context.optimizer is None or not context.optimizer.started:
        raise UsageError(
            "progress() before training has started: this rank does not know the job yet",
            hint="call it inside the loop over loader.epochs() or pl.steps()",
        )
    return context.session.progress


def is_publisher() -> bool:
    """Return True on exactly one rank, which writes results and files for all.

    Which rank it is may change when ranks join or leave. A rank whose loop has ended is the
    publisher only if the loops of all ranks have ended. Before training starts it is rank 0; a rank
    that was started again is not.

    Returns:
        True if this rank is the publisher now.
    """
    return current("is_publisher()").session.is_publisher


def log(name: str, value: float | torch.Tensor, weight: float = 1.0) -> None:
    """Report a metric of this step; the job shows the weighted mean over all ranks (D11).

    The metric travels with the announcement of the step, so it counts exactly when the gradient of
    the step does. Several calls with one name between two steps add up.

    Args:
        name: Name of the metric.
        value: A number or a tensor with one element.
        weight: Weight of the value in the mean, such as the number of samples.
    """
    current("log()").log(name, value, weight)


@contextmanager
def evaluating() -> Iterator[None]:
    """Run something long on this rank, such as a validation, without delaying the other ranks.

    Inside the block the rank has given its leases back and counts as idle. Afterwards the model
    holds the newest weights. In modes Full and Shadow, and with a quorum of all ranks, each round
    needs all of them. There the rank keeps its leases and the others wait for it, up to
    `benchAfter`: an evaluation on every rank is a common pause. Before training starts and after
    the job's end the block has no effect on the job. Main thread only, never between backward() and
    step().

    Yields:
        Nothing.
    """
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
    """End training in a script with a loop of its own; `loader.epochs()` does it by itself.

    Copies the final weights into the model and blocks until the coordinator releases the job (D7).
    """
    current("finish()").finish()


def stop() -> None:
    """End the job on all ranks before its plan is complete; one rank that calls it is enough.

    The job ends with the next round, on every rank with the same version of the weights. Like
    `finish()`, this call copies the final weights into the model and blocks until the coordinator
    releases the job. A rank that has called it becomes the publisher. The loops of the other ranks
    (`loader.epochs()`, `pl.steps()`) end by themselves. Call it between `step()` and the next
    `backward()`.
    """
    current("stop()").stop()
