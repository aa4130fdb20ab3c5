"""B10 with Paceline: the loop of a plain script, timed as the one with DDP is."""

from __future__ import annotations

import paceline as pl
import torch

from benchmarks.even import CONFIG, make, make_optimizer
from benchmarks.probe import Probe


def main() -> None:
    """Train until the job stops."""
    torch.set_num_threads(1)
    probe = Probe(rounds=CONFIG["watch_rounds"])
    pl.init()
    model, loss_of = make(pl.rank())
    optimizer = pl.DistributedOptimizer(make_optimizer(model), model)
    step = 0
    while not optimizer.stopped:
        loss_of(model, step).backward()
        probe.step(optimizer)
        step += 1
    pl.finish()
    probe.write(rank=pl.rank(), hash=optimizer.committed.strong_hash())


main()
