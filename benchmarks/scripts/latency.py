"""B0: in each iteration, rank i arrives `stagger_ms` x i late; then the next one begins for all.

Iterations begin on a grid of the machine's monotonic clock, so they are aligned without a message.
The gradient of each step is one in every element and the update adds it, so the weights count the
applied gradients.
"""

from __future__ import annotations

import time

import paceline as pl
import torch
from paceline.clock import now_ns
from paceline_api.times import NS_PER_MS

from benchmarks.probe import CONFIG, Probe


def main() -> None:
    """Step until the job stops, and write the probe."""
    torch.set_num_threads(1)
    probe = Probe()
    pl.init()
    weight = torch.nn.Parameter(torch.zeros(CONFIG["elements"]))
    model = torch.nn.ParameterList([weight])
    optimizer = pl.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), model)
    period_ns, stagger_ns = CONFIG["period_ms"] * NS_PER_MS, CONFIG["stagger_ms"] * NS_PER_MS
    weight.sum().backward()
    optimizer.step()  # blocks until all are members
    late_ns = pl.rank() * stagger_ns
    iteration = 0
    while not optimizer.stopped:
        # Take the first iteration in which this rank's arrival is still ahead.
        iteration = max(iteration + 1, -(-(now_ns() - late_ns) // period_ns))
        time.sleep(max(0, iteration * period_ns + late_ns - now_ns()) / 1e9)
        weight.sum().backward()
        probe.step(optimizer, iteration)
    pl.finish()
    probe.write(
        rank=pl.rank(),
        hash=optimizer.committed.strong_hash(),
        applied=round(-float(weight.detach()[0]) * pl.size()),
    )


main()
