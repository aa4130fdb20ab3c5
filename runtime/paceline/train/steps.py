"""`pl.steps`: loop for a script that draws its own batches, as long as the job has steps left.

    for step in pl.steps(5000):
        x, y = get_batch("train")
        loss_fn(model(x), y).backward()
        optimizer.step()

The job counts the steps, not the rank: the number is a function of the round log. A rank that joins
late or is started again begins with the present step of the job. All ranks end with the same step.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.protocol.records import DataPlan
from paceline.errors import UsageError
from paceline.train.context import current
from paceline.train.optimizer import SELF_FED_LOOKAHEAD


def steps(count: int) -> Iterator[int]:
    """Yield the step numbers of the job, from its present one up to `count` - 1.

    Call `optimizer.step()` once per iteration. The first iteration starts training. When the loop
    runs to its end, the final weights are in the model and the coordinator has released the job.
    One step of the job is one step of each rank: one round in mode Full. In other modes a number
    may come twice on a fast rank, and a slow rank misses some, so do not rely on seeing each
    number. Main thread only.

    Args:
        count: Number of steps that the job makes, 1 or more.

    Yields:
        The present step of the job, from 0.

    Raises:
        UsageError: Training had started before, or `count` is not a whole number of 1 or more.
    """
    check_count(count)
    context = current("steps()")
    optimizer = context.need_optimizer("steps()")
    if optimizer.started:
        raise UsageError(
            "steps() after training had started",
            hint="one loop over pl.steps() or loader.epochs() per job; begin it before any step()",
        )
    optimizer.start(DataPlan(steps=count), SELF_FED_LOOKAHEAD)
    session = context.session
    while not session.stopped:
        step = session.progress.step + session.under_way
        if step < count:
            yield step
        else:  # the last step is in flight
            session.flush()
    context.finish()


def check_count(count: object) -> None:
    """Raise UsageError unless `count` is an int of 1 or more."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"steps={count!r}", hint="give a whole number, 1 or more")
