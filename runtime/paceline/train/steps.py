"""`pl.steps`: the loop of a script that feeds itself, as long as the job has steps left.

    for step in pl.steps(5000):
        x, y = get_batch("train")
        loss_fn(model(x), y).backward()
        optimizer.step()

The job counts, not the rank: the number is a function of the round log. A rank that comes late or
is started again begins with the step that the job is at, and all ranks end with the same one.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.protocol.records import DataPlan
from paceline.errors import UsageError
from paceline.train.context import current
from paceline.train.optimizer import SELF_FED_LOOKAHEAD


def steps(count: int) -> Iterator[int]:
    """The steps of the job from its present one on, up to `count`; one `optimizer.step()` in each.

    One step is as many steps of single ranks as ranks train: a round in Full mode. In other modes a
    number may come twice on a fast rank, and a slow rank misses some, so do not count on each.
    Running it to its end copies the final weights into the model and waits for the release of the
    job.
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
        else:  # the last one is under way
            session.flush()
    context.finish()


def check_count(count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"steps={count!r}", hint="give a whole number, 1 or more")
