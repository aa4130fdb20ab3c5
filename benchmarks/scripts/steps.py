"""B0, B5 and B6: steps of a given length, or staggered arrivals; the gradient is one.

The gradient of each step is one in every element and the update adds it, so the weights count the
applied gradients. With `period_ms` (B0), rank i arrives `stagger_ms` x i late in each iteration,
then the next one begins for all. Iterations begin on a grid of the machine's monotonic clock, so
they are aligned without a message. Else a step is spent asleep, in torch or in Python.

Knobs: `work` (sleep, torch or python), `step_ms`, and `slow_ms`, the length for `slow_rank`. Torch
and Python do a fixed amount of work, which was measured to take that long while nothing else runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import paceline as pl
import torch
from paceline.clock import now_ns
from paceline_api.times import NS_PER_MS

from benchmarks.probe import CONFIG, MEMBER, Probe

TRIES = 5
WAIT_NS = 30 * 10**9
SIDE = 96


def main() -> None:
    """Step until the job stops, and write the probe."""
    torch.set_num_threads(1)
    matrix = torch.ones(SIDE, SIDE) / SIDE
    cost_s = agreed_costs(matrix)
    probe = Probe()
    pl.init()
    weight = torch.nn.Parameter(torch.zeros(CONFIG["elements"]))
    model = torch.nn.ParameterList([weight])
    optimizer = pl.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), model)
    ones = torch.ones_like(weight)
    (weight * ones).sum().backward()
    optimizer.step()
    iteration = 0
    while not optimizer.stopped:
        if "period_ms" in CONFIG:
            iteration = arrive(iteration)
        else:
            work(probe, matrix, cost_s)
        (weight * ones).sum().backward()
        probe.step(optimizer, iteration)
    pl.finish()
    probe.write(
        rank=pl.rank(),
        hash=optimizer.committed.strong_hash(),
        applied=round(-float(weight.detach()[0]) * pl.size()),
        cost_us={name: 1e6 * value for name, value in cost_s.items()},
    )


def arrive(before: int) -> int:
    """Sleep until this rank's arrival in the first iteration in which that is still ahead.

    Args:
        before: Number of the last iteration.

    Returns:
        Number of the iteration.
    """
    period_ns = CONFIG["period_ms"] * NS_PER_MS
    late_ns = pl.rank() * CONFIG["stagger_ms"] * NS_PER_MS
    iteration: int = max(before + 1, -(-(now_ns() - late_ns) // period_ns))
    time.sleep(max(0, iteration * period_ns + late_ns - now_ns()) / 1e9)
    return iteration


def work(probe: Probe, matrix: torch.Tensor, cost_s: dict[str, float]) -> None:
    """Spend the length of a step in the way of the knob `work`."""
    slow = pl.rank() == CONFIG.get("slow_rank", -1)
    seconds = probe.knob("slow_ms" if slow else "step_ms", 20) / 1000
    match probe.knob("work", "sleep"):
        case "torch":
            in_torch(matrix, round(seconds / cost_s["torch"]))
        case "python":
            in_python(round(seconds / cost_s["python"]))
        case _:
            time.sleep(seconds)


def in_torch(matrix: torch.Tensor, times: int) -> None:
    """Run small torch operations, as in small models: the interpreter is entered after each."""
    x = matrix
    for _ in range(times):
        x = x @ matrix


def in_python(times: int) -> int:
    """Run pure Python, which holds the interpreter lock all the time."""
    total = 0
    for number in range(times):
        total += number & 7
    return total


def agreed_costs(matrix: torch.Tensor) -> dict[str, float]:
    """Return the seconds of one unit of each kind of work; the first rank measures for all."""
    path = Path("costs.json")
    if MEMBER == "0.0#0":
        # Measure for the length of a step, so that caches and allocator behave as in a step.
        costs = {
            "torch": unit_s(lambda times: in_torch(matrix, times), 400),
            "python": unit_s(in_python, 200_000),
        }
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(costs))
        draft.rename(path)
        return costs
    until = now_ns() + WAIT_NS
    while not path.exists():
        assert now_ns() < until, "rank 0 has not measured"
        time.sleep(0.02)
    agreed: dict[str, float] = json.loads(path.read_text())
    return agreed


def unit_s(work: Callable[[int], object], times: int) -> float:
    """Return the seconds of one unit of work, the median of several tries."""
    times_s = []
    for _ in range(TRIES):
        begun = now_ns()
        work(times)
        times_s.append((now_ns() - begun) / 1e9 / times)
    return median(times_s)


main()
