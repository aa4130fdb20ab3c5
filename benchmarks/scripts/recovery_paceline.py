"""B8 with Paceline: a plain script's loop; the communication thread reports the commits."""

from __future__ import annotations

import os
from typing import Any

import paceline as pl
import torch
from paceline.worker.comm_thread import CommThread
from paceline_api.ids import parse_member

from benchmarks.progress import Progress, loss_of, make_model, make_optimizer, perhaps_die


def main() -> None:
    """Train until the job stops; the victim kills itself on its first attempt."""
    torch.set_num_threads(1)
    member = parse_member(os.environ["PACELINE_MEMBER"])
    progress = Progress(f"{member.slot}-{member.attempt}")
    apply = CommThread._apply  # noqa: SLF001

    def told(driver: CommThread, go: Any, *given: Any, **named: Any) -> Any:
        after = apply(driver, go, *given, **named)
        progress.tell(go.round + 1, go.contributing)
        return after

    setattr(CommThread, "_apply", told)  # noqa: B010
    pl.init()
    model = make_model()
    optimizer = pl.DistributedOptimizer(make_optimizer(model), model)
    step = 0
    while not optimizer.stopped:
        loss_of(model, step).backward()
        optimizer.step()
        step += 1
        if member.attempt == 0:
            perhaps_die(member.slot, step)
    pl.finish()


main()
