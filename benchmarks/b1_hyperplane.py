"""B1: hyperplane regression, eight ranks, in each step one random rank is late (eager-SGD's E1).

Full and Quorum also run with a pipeline: a rank may then be late by part of a step without delaying
the others. All times are a quarter of the published ones: steps of 100 ms, delays of 50, 75 and 100
ms. Each run is a job of its own from the same initial weights. After a fixed time, its weights are
judged on the validation points. Grace is 0. The limit is what the delays allow with rounds that
cost nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from benchmarks.jobs import example
from benchmarks.lab import Phase, Plan, Ran
from benchmarks.rounds import NS, check_job
from testing.temporary import temporary_folder

SCALE = 4
WORK_MS = 400 / SCALE
DELAYS_MS = (200, 300, 400)
RANKS = 8
BATCH = 256
SECONDS = 3.0
MARGIN_S = 0.4
"""Time from the moment at which the weights are judged until the job is stopped."""
MODES: dict[str, dict[str, Any]] = {
    "Full": {"mode": "Full"},
    "Quorum(4)": {"mode": "Quorum", "quorum": 4},
    "Solo": {"mode": "Solo"},
    "Full, pipeline": {"mode": "Full", "pipeline": 1},
    "Quorum(4), pipeline": {"mode": "Quorum", "quorum": 4, "pipeline": 1},
}
BARS = {
    ("Solo", 200): 1.47,
    ("Solo", 300): 1.71,
    ("Solo", 400): 1.95,
    ("Quorum(4)", 200): 1.39,
    ("Quorum(4)", 300): 1.60,
    ("Quorum(4)", 400): 1.78,
}
BAR_SHARE = 0.97
BAR_LOSS = 1.01


@dataclass(frozen=True)
class Size:
    """Size of the task and length of a run."""

    ranks: int
    points: int
    dimensions: int
    seconds: float
    delays_ms: tuple[int, ...]


@dataclass(frozen=True)
class Figures:
    """Figures of one run."""

    rounds_per_s: float
    gradients_per_s: float
    fresh: float
    loss: float

    @classmethod
    def of(cls, ran: Ran) -> Figures:
        """Read the figures of a run from its first rank."""
        first = ran.probes[0]
        commits = [c for c in first["commits"] if first["began"] < c["at"] <= first["until"]]
        seconds = (commits[-1]["at"] - commits[0]["at"]) / NS
        return cls(
            (len(commits) - 1) / seconds,
            sum(c["gradients"] for c in commits[1:]) / seconds,
            sum(c["fresh"] for c in commits) / len(commits),
            first["loss"],
        )


def plan(size: Size, mode: str, delay_ms: int, folder: Path) -> Plan:
    """Return the job for one mode and one delay; `folder` holds the drawn points."""
    config = {
        "folder": str(folder),
        "points": size.points,
        "dimensions": size.dimensions,
        "batch": BATCH,
        "lr": 0.02,
        "work_ms": WORK_MS,
        "seconds": size.seconds,
    }
    # Use the defaults except for grace: it would add 5 % to every round, and eager-SGD has none.
    collective = {"grace": "0s", "maxAge": 4, **MODES[mode]}
    return Plan(
        "hyperplane.py",
        size.ranks,
        [Phase(mode, size.seconds + MARGIN_S)],
        config,
        collective=collective,
        faults=f"slow:rank=random,ms={delay_ms / SCALE:g}",
        one_pod=True,
    )


def limit(mode: str, delay_ms: int, ranks: int) -> tuple[float, float]:
    """Return the rates that the delays allow if rounds cost nothing and one rank is late at a time.

    Returns:
        Rounds per second and gradients per second.
    """
    step_s, delay_s = WORK_MS / 1000, delay_ms / SCALE / 1000
    if "pipeline" in MODES[mode]:  # at best no rank waits, and a round takes its quorum
        gradients = ranks / (step_s + delay_s / ranks)
        return gradients / MODES[mode].get("quorum", ranks), gradients
    if mode == "Full":
        return 1 / (step_s + delay_s), ranks / (step_s + delay_s)
    return 1 / step_s, ranks / (step_s + delay_s / ranks)


def add_rows(out: Report, runs: dict[tuple[str, int], list[Figures]], size: Size) -> None:
    """Add the rows and bars of all modes and delays to the report."""
    for (mode, delay_ms), figures in runs.items():
        full = runs["Full", delay_ms]
        own = {name: [asdict(f)[name] for f in figures] for name in asdict(figures[0])}
        over = {name: ratios(own[name], [asdict(f)[name] for f in full]) for name in own}
        limits = limit(mode, delay_ms, size.ranks)
        rounds = own["rounds_per_s"]
        out.rows.append(
            (
                *(f"+{delay_ms} ms / {SCALE}", mode, middle(rounds), limits[0]),
                *(percent(spread(rounds)), *with_spread(over["rounds_per_s"])),
                *(middle(own["gradients_per_s"]), limits[1], middle(over["gradients_per_s"])),
                *(middle(own["fresh"]), middle(own["loss"]), middle(over["loss"])),
            )
        )
        out.samples[f"+{delay_ms} ms, {mode}"] = own
        if (wanted := BARS.get((mode, delay_ms))) is not None:
            text = f"+{delay_ms} ms, {mode} over Full, rounds/s ({BAR_SHARE:.0%} of {wanted})"
            out.at_least(text, middle(over["rounds_per_s"]), BAR_SHARE * wanted)
            text = f"+{delay_ms} ms, {mode}: loss at equal time over Full's"
            out.at_most(text, middle(over["loss"]), BAR_LOSS)


@benchmark(
    "B1: hyperplane regression, one random rank late in each step",
    (
        *("delay", "mode", "rounds/s", "limit", "spread", "over Full", "its spread"),
        *("gradients/s", "limit", "over Full", "fresh", "loss", "over Full's"),
    ),
)
def run(out: Report) -> None:
    """Run B1."""
    size = Size(RANKS, 32_768, 8_192, SECONDS, DELAYS_MS)
    if out.smoke:
        size = Size(4, 2048, 256, 1.2, (400,))
    out.title += f", {size.ranks} ranks, times divided by {SCALE}, judged after {size.seconds:g} s"
    kept = "every run was judged at its time"
    with temporary_folder() as scratch:
        # Draw the points before the first run, so that no run has to wait for them.
        example("hyperplane").open_points(scratch, size.points, size.dimensions)

        def one(mode: str, delay_ms: int) -> Figures:
            ran = out.lab.run(plan(size, mode, delay_ms, scratch))
            check_job(out, ran, "all runs", counted=False)
            out.checks[kept] = out.checks.get(kept, True) and bool(ran.probes[0]["kept"])
            return Figures.of(ran)

        sides = {f"{m}|{d}": partial(one, m, d) for d in size.delays_ms for m in MODES}
        figures = interleave(1 if out.smoke else out.rounds, sides)
    keys = ((mode, delay) for delay in size.delays_ms for mode in MODES)
    add_rows(out, dict(zip(keys, figures.values(), strict=True)), size)
    out.notes.append(
        f"batch {BATCH} per rank, {size.points:,} points in {size.dimensions:,} dimensions, SGD"
    )
