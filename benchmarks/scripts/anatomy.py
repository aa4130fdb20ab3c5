"""The study of a step (`benchmarks.anatomy`): B10's loop, with knobs, and with work beside it.

The knobs are `batch` and `threads`; `late` and `late_ms` of the last rank; `work` and `work_ms` of
a thread of rank 0, which begins with each step.

    evaluation      of the weights of this step: has to end before step()
    data            of the next batch: has to end before that
    data in Python  the same, with the interpreter lock held

The length of work is CPU time of its thread, so it does not depend on the machine's load.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import paceline as pl
import torch

from benchmarks.even import CONFIG, make, make_optimizer
from benchmarks.probe import Probe

SIDE: Final = 192
LATE: Final[dict[str, tuple[str, int]]] = {
    "": ("", 0),
    "step": ("in front", 0),
    "backward": ("inside", CONFIG.get("layers", 1) - 1),
    "last segment": ("inside", 0),
}
"""Kind of lateness as in `even.Late`, and its layer, by value of the knob; backward() begins with
the last layer."""


def turn(probe: Probe, model: Any, threads: int) -> int:
    """Apply the knobs to this step and return torch's number of threads."""
    if CONFIG["model"] == "emulated":
        model.scale = probe.knob("batch", CONFIG["batch"]) / CONFIG["batch"]
        late = model.late
        late.victim = CONFIG["ranks"] - 1
        late.how, late.layer = LATE[probe.knob("late", "")]
        late.ms = probe.knob("late_ms", 0)
    wanted: int = probe.knob("threads", 1)
    if wanted != threads:
        torch.set_num_threads(wanted)
    return wanted


def work(what: str, seconds: float) -> None:
    """Work for `seconds` seconds of CPU time."""
    matrix = torch.ones(SIDE, SIDE) / SIDE
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        if what == "data in Python":
            sum(number & 7 for number in range(1000))
        else:
            matrix = matrix @ matrix


def main() -> None:
    """Train until the job stops."""
    threads = 1
    torch.set_num_threads(threads)
    probe = Probe(rounds=False)
    pl.init()
    model, loss_of = make(pl.rank())
    optimizer = pl.DistributedOptimizer(make_optimizer(model), model)
    pool = ThreadPoolExecutor(1)
    step = worked = 0
    while not optimizer.stopped:
        threads = turn(probe, model, threads)
        what = probe.knob("work", "") if pl.rank() == 0 else ""
        pending: Future[None] | None = None
        if what:
            pending = pool.submit(work, what, probe.knob("work_ms", 0) / 1000)
            worked += 1
        loss_of(model, step).backward()
        if pending is not None and what == "evaluation":
            pending.result()
        optimizer.step()
        if pending is not None:
            pending.result()
        step += 1
    pool.shutdown()
    pl.finish()
    probe.write(rank=pl.rank(), hash=optimizer.committed.strong_hash(), worked=worked)


main()
