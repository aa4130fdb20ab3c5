"""B1: hyperplane regression, eight ranks, in each step one random rank is late (eager-SGD's E1).

Full and Quorum also run with a pipeline: a rank may then be late by part of a step without delaying
the others. All times are a quarter of the published ones: steps of 100 ms, delays of 50, 75 and 100
ms. Each run is a job of its own from the same initial weights. After a fixed time, its weights are
judged on the validation points. Grace is 0. The limit is what the delays allow with rounds that
cost nothing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import ROOT, Lab, Phase, Plan, Ran
from benchmarks.rounds import NS, same_weights
from testing.temporary import temporary_folder

SCALE = 4
WORK_MS = 400 / SCALE
DELAYS_MS = (200, 300, 400)
RANKS = 8
BATCH = 256
SECONDS = 3.0
MARGIN_S = 0.4
"""Time from the moment at which the weights are judged until the job is stopped."""
EXAMPLE = ROOT / "examples" / "hyperplane"
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


@dataclass
class Runs:
    """Figures of one mode with one delay, one value per run."""

    rounds_per_s: list[float] = field(default_factory=list)
    gradients_per_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)

    def add(self, ran: Ran) -> None:
        """Read the figures of a run from its first rank."""
        first = ran.probes[0]
        commits = [c for c in first["commits"] if first["began"] < c["at"] <= first["until"]]
        seconds = (commits[-1]["at"] - commits[0]["at"]) / NS
        self.rounds_per_s.append((len(commits) - 1) / seconds)
        self.gradients_per_s.append(sum(c["gradients"] for c in commits[1:]) / seconds)
        self.fresh.append(sum(c["fresh"] for c in commits) / len(commits))
        self.losses.append(first["loss"])


def plan(size: Size, mode: str, delay_ms: int, folder: Path) -> Plan:
    """Return the job for one mode and one delay; `folder` holds the drawn points."""
    config = {
        "example": str(EXAMPLE),
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


def draw_points(size: Size, folder: Path) -> None:
    """Draw the points before the first run, so that no run has to wait for them."""
    spec = importlib.util.spec_from_file_location("hyperplane_example", EXAMPLE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.open_points(folder, size.points, size.dimensions)


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


def add_rows(out: r.Report, runs: dict[tuple[str, int], Runs], size: Size) -> None:
    """Add the rows and bars of all modes and delays to the report."""
    for (mode, delay_ms), found in runs.items():
        full = runs["Full", delay_ms]
        rounds = [a / b for a, b in zip(found.rounds_per_s, full.rounds_per_s, strict=True)]
        gradients = [
            a / b for a, b in zip(found.gradients_per_s, full.gradients_per_s, strict=True)
        ]
        losses = [a / b for a, b in zip(found.losses, full.losses, strict=True)]
        limits = limit(mode, delay_ms, size.ranks)
        out.rows.append(
            (
                f"+{delay_ms} ms / {SCALE}",
                mode,
                r.middle(found.rounds_per_s),
                limits[0],
                r.percent(r.spread(found.rounds_per_s)),
                r.middle(rounds),
                r.percent(r.spread(rounds)),
                r.middle(found.gradients_per_s),
                limits[1],
                r.middle(gradients),
                r.middle(found.fresh),
                r.middle(found.losses),
                r.middle(losses),
            )
        )
        if mode == "Full" or (mode, delay_ms) not in BARS:
            continue
        wanted = BARS[mode, delay_ms]
        out.bars.append(
            r.Bar(
                f"+{delay_ms} ms, {mode} over Full, rounds/s ({BAR_SHARE:.0%} of {wanted})",
                r.middle(rounds),
                BAR_SHARE * wanted,
            )
        )
        out.bars.append(
            r.Bar(
                f"+{delay_ms} ms, {mode}: loss at equal time over Full's",
                r.middle(losses),
                BAR_LOSS,
                at_least=False,
            )
        )


def run(lab: Lab, given: Options) -> r.Report:
    """Run B1 and return its report."""
    if given.smoke:
        size = Size(4, 2048, 256, 1.2, (400,))
    else:
        size = Size(RANKS, 32_768, 8_192, SECONDS, DELAYS_MS)
    out = r.Report(
        "b1_hyperplane",
        f"B1: hyperplane regression, {size.ranks} ranks, one random rank late in each step, times "
        f"divided by {SCALE}, judged after {size.seconds:g} s",
        (
            *("delay", "mode", "rounds/s", "limit", "spread", "over Full", "its spread"),
            *("gradients/s", "limit", "over Full", "fresh", "loss", "over Full's"),
        ),
        smoke=given.smoke,
    )
    runs = {(mode, delay): Runs() for delay in size.delays_ms for mode in MODES}
    hashes: list[str] = []
    equal = kept = True
    with temporary_folder() as scratch:
        draw_points(size, scratch)
        for _ in range(1 if given.smoke else given.rounds):
            for (mode, delay_ms), found in runs.items():
                ran = lab.run(plan(size, mode, delay_ms, scratch))
                found.add(ran)
                equal = equal and same_weights(ran)
                kept = kept and bool(ran.probes[0]["kept"])
                hashes.append(ran.probes[0]["hash"])
    add_rows(out, runs, size)
    out.checks["equal weights on all ranks, in every run"] = equal
    out.checks["every run was judged at its time"] = kept
    out.hashes["all runs"] = r.one_hash(hashes)
    out.notes.append(
        f"batch {BATCH} per rank, {size.points:,} points in {size.dimensions:,} dimensions, SGD"
    )
    return out


if __name__ == "__main__":
    main(run, __doc__)
