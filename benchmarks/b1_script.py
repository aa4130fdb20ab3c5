"""B1 by a plain DDP script: hyperplane regression, in each step one random rank of eight is late.

In an unchanged script every rank goes through every step, so a late rank can be one step behind at
most (S17 of docs/design/scripts.md). The limit is what this allows with rounds that cost nothing,
for the ranks that were late here. All times are half of the published ones: steps of 200 ms, delays
of 100, 150 and 200 ms. Each mode is a job of its own, which trains once for each delay. Grace is 0.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import b1_hyperplane
from benchmarks.b1_hyperplane import BAR_SHARE, DELAYS_MS, RANKS
from benchmarks.harness import (
    Report,
    benchmark,
    interleave,
    middle,
    percent,
    ratios,
    spread,
    with_spread,
)
from benchmarks.jobs import PACELINE, SCRIPTS, manifest, run_job
from testing.temporary import temporary_folder

SCALE: Final = 2
WORK_MS: Final = 400 / SCALE
STEPS: Final = 48
WARM: Final = 3
"""First steps of each delay, which are not measured."""
LIMIT_S: Final = 600.0
QUORUMS: Final = {"Full": RANKS, "Quorum(4)": 4, "Solo": 1}
"""Fresh ranks that each mode waits for."""
MODES: Final = {mode: b1_hyperplane.MODES[mode] for mode in QUORUMS}
BARS: Final = {
    ("Solo", 200): 1.36,
    ("Solo", 300): 1.48,
    ("Solo", 400): 1.58,
    ("Quorum(4)", 200): 1.35,
    ("Quorum(4)", 300): 1.47,
    ("Quorum(4)", 400): 1.56,
}
"""Speed over Full of an event model with one step of lag, over 4,000 steps."""
BAR_LOSS: Final = 1.05


class Figures(NamedTuple):
    """Figures of one delay in one job."""

    steps_per_s: float
    loss: float
    """Loss over all data after the last step."""
    equal: bool
    """True if all ranks ended with equal weights."""


def measure(mode: str, ranks: int, steps: int, delays_ms: tuple[int, ...]) -> list[Figures]:
    """Run one job and return its figures by delay."""
    with temporary_folder() as folder:
        scaled = [str(delay / SCALE) for delay in delays_ms]
        words = [str(SCRIPTS / "late_ddp.py"), str(folder), str(WORK_MS), str(steps), *scaled]
        # Ranks on a loaded machine must not look frozen.
        collective = {"backend": "shm", "grace": "0s", "freezeTimeout": "60s", **MODES[mode]}
        job = manifest([str(PACELINE), "launch", *words], replicas=ranks, collective=collective)
        run_job(job, Path(folder), limit_s=LIMIT_S)
        by_rank = [
            json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))
        ]
    return [_figures([rank[number] for rank in by_rank]) for number in range(len(delays_ms))]


def _figures(by_rank: list[dict[str, Any]]) -> Figures:
    # A step has ended when a rank goes on with its average; the first one shows when it was made.
    ends = [min(rank["ends"][step] for rank in by_rank) for step in range(len(by_rank[0]["ends"]))]
    rate = (len(ends) - 1 - WARM) / ((ends[-1] - ends[WARM]) / 1e9)
    return Figures(rate, by_rank[0]["loss"], len({rank["sum"] for rank in by_rank}) == 1)


def limit(quorum: int, ranks: int, steps: int, delay_ms: int) -> float:
    """Return the steps per second that one step of lag allows if rounds cost nothing.

    The ranks that are late are those that the script draws.

    Args:
        quorum: Ranks that a step waits for.
        ranks: Number of ranks.
        steps: Number of steps.
        delay_ms: Delay of the late rank, as published.
    """
    late, delay_s, work_s = random.Random(delay_ms / SCALE), delay_ms / SCALE / 1000, WORK_MS / 1000
    start, made = [0.0] * ranks, [0.0]
    for _ in range(steps):
        drawn = late.randrange(ranks)
        done = [at + work_s + (delay_s if rank == drawn else 0.0) for rank, at in enumerate(start)]
        closed = max(sorted(done)[quorum - 1], *start)  # all have taken the average before
        start = [max(at, closed) for at in done]
        made.append(closed)
    return (steps - 1 - WARM) / (made[-1] - made[WARM + 1])


@benchmark(
    "B1 by a plain DDP script: hyperplane regression, one random rank late in each step",
    (
        *("delay", "mode", "steps/s", "limit", "spread", "over Full", "its spread"),
        *("limit over Full's", "loss", "over Full's"),
    ),
)
def run(out: Report) -> None:
    """Run B1 by a plain DDP script."""
    ranks, steps, delays_ms = (4, 12, (400,)) if out.smoke else (RANKS, STEPS, DELAYS_MS)
    out.title += f", {ranks} ranks, times divided by {SCALE}, {steps} steps"
    sides = {mode: partial(measure, mode, ranks, steps, delays_ms) for mode in MODES}
    jobs = interleave(1 if out.smoke else out.rounds, sides)
    out.checks["all ranks ended with equal weights"] = all(
        figures.equal for runs in jobs.values() for job in runs for figures in job
    )
    for number, delay_ms in enumerate(delays_ms):
        of_delay = {mode: [job[number] for job in runs] for mode, runs in jobs.items()}
        limits = {mode: limit(min(QUORUMS[mode], ranks), ranks, steps, delay_ms) for mode in MODES}
        for mode, figures in of_delay.items():
            rates = [one.steps_per_s for one in figures]
            over = ratios(rates, [one.steps_per_s for one in of_delay["Full"]])
            losses = [one.loss for one in figures]
            loss_over = middle(ratios(losses, [one.loss for one in of_delay["Full"]]))
            out.rows.append(
                (
                    *(f"+{delay_ms} ms / {SCALE}", mode, middle(rates), limits[mode]),
                    *(percent(spread(rates)), *with_spread(over), limits[mode] / limits["Full"]),
                    *(middle(losses), loss_over),
                )
            )
            out.samples[f"+{delay_ms} ms, {mode}"] = {"steps_per_s": rates, "loss": losses}
            if (wanted := BARS.get((mode, delay_ms))) is not None and not out.smoke:
                text = f"+{delay_ms} ms, {mode} over Full, steps/s ({BAR_SHARE:.0%} of {wanted})"
                out.at_least(text, middle(over), BAR_SHARE * wanted)
                out.at_most(f"+{delay_ms} ms, {mode}: loss over Full's", loss_over, BAR_LOSS)
