"""The digits under a published load: accuracy after the same epochs, and after the same time.

Each row is a program of its own that starts from the same weights on the same images, with the same
learning rate and momentum. Paceline's rows apply every image exactly once per epoch, with grace 0
and nothing dropped. The two others are small re-implementations on gloo
(`scripts/digits_others.py`), not the published systems. Steps are emulated: each takes as long as
is drawn from the LSTM's load, the same for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from benchmarks.harness import Report, benchmark, interleave, middle, percent, ratios, spread
from benchmarks.lab import Lab, Plan
from benchmarks.loads import WAYS
from benchmarks.rounds import check_job
from testing.temporary import temporary_folder

LOAD = "lstm"
ENOUGH = 0.9
OTHERS = {"asynchronous server (re-made)": "server", "D-PSGD, ring (re-made)": "neighbours"}
LIMIT_S = 240.0


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    ranks: int
    epochs: int
    scale: float
    """Factor on the published times."""


def config(size: Size, seed: int) -> dict[str, Any]:
    """Return the configuration of a program."""
    return {"load": LOAD, "scale": size.scale, "seed": seed, "epochs": size.epochs}


def plan(size: Size, mode: str, seed: int) -> Plan:
    """Return the job of Paceline in one mode."""
    return Plan(
        "digits_paceline.py",
        size.ranks,
        [],
        config(size, seed),
        collective={"grace": "0s", **WAYS[mode].collective},
        faults=f"slow:load={LOAD},scale={size.scale},seed={seed}",
        one_pod=True,
        own_end_s=LIMIT_S,
    )


def other(lab: Lab, size: Size, way: str, seed: int) -> dict[str, Any]:
    """Run a re-implemented system and return the results of the rank that keeps the weights."""
    server = way == "server"
    order = {
        **config(size, seed),
        "script": "digits_others.py",
        "way": way,
        "workers": size.ranks,
        "ranks": size.ranks + server,
    }
    with temporary_folder() as folder:
        by_rank: list[dict[str, Any]] = lab.call(
            "benchmarks.plain_ranks:run", order, folder, limit_s=LIMIT_S
        )
    return by_rank[-1 if server else 0]


def at(run: dict[str, Any], moment: float) -> float:
    """Return the accuracy of a run at a moment in seconds, or at its end."""
    if moment > run["seconds"]:
        return float(run["accuracy"])
    return float(max((at, accuracy) for at, accuracy in run["curve"] if at <= moment)[1])


@benchmark(
    f"Digits under the {LOAD.upper()}'s load",
    (
        *("system", "seconds", "spread", "Full/it", "accuracy after the epochs", "its range"),
        *("accuracy at half of Full's time", f"seconds to {100 * ENOUGH:.0f} %"),
    ),
)
def run(out: Report) -> None:
    """Run all systems."""
    size = Size(3, 1, 0.01) if out.smoke else Size(8, 30, 0.05)
    out.title += f", {size.ranks} ranks, {size.epochs} epochs, its times x {size.scale}"

    def job(mode: str, seeds: count[int]) -> dict[str, Any]:
        ran = out.lab.run(plan(size, mode, next(seeds)))
        check_job(out, ran, "all jobs", counted=False)
        return dict(ran.probes[0])

    def beside(way: str, seeds: count[int]) -> dict[str, Any]:
        return other(out.lab, size, way, next(seeds))

    sides: dict[str, Callable[[], dict[str, Any]]] = {m: partial(job, m, count()) for m in WAYS}
    sides |= {name: partial(beside, way, count()) for name, way in OTHERS.items()}
    results = interleave(1 if out.smoke else out.rounds, sides)
    full_s = [run["seconds"] for run in results["Full"]]
    for name, runs in results.items():
        seconds, accuracies = ([run[key] for run in runs] for key in ("seconds", "accuracy"))
        curves = [run["curve"] for run in runs]
        ats = ([s for s, accuracy in curve if accuracy >= ENOUGH] for curve in curves)
        reached = [seconds[0] for seconds in ats if seconds]
        half = [at(run, moment / 2) for run, moment in zip(runs, full_s, strict=True)]
        out.rows.append(
            (
                *(name, middle(seconds), percent(spread(seconds))),
                *(middle(ratios(full_s, seconds)), f"{middle(accuracies):.4f}"),
                *(f"{min(accuracies):.4f} to {max(accuracies):.4f}", f"{middle(half):.4f}"),
                middle(reached) if reached else "not reached",
            )
        )
        out.samples[name] = {"seconds": seconds, "curves": curves}
    out.notes.append(
        "D-PSGD: the accuracy after the epochs is that of the mean of all ranks, those over time "
        "are of one rank's own weights"
    )
    out.notes.append(
        "the server is a further process; it applies 1/P of the learning rate per push"
    )
