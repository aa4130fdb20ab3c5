"""The digits under a published load: accuracy after the same epochs, and after the same time.

Each row is a program of its own that starts from the same weights on the same images, with the same
learning rate and momentum. Paceline's rows apply every image exactly once per epoch, with grace 0
and nothing dropped. The two others are small re-implementations on gloo
(`scripts/digits_others.py`), not the published systems. Steps are emulated: each takes as long as
is drawn from the LSTM's load, the same for every row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import Lab, Plan
from benchmarks.loads import WAYS
from benchmarks.rounds import same_weights
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


@dataclass
class Runs:
    """Figures of one row, one value per run."""

    seconds: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    curves: list[list[tuple[float, float]]] = field(default_factory=list)

    def add(self, facts: dict[str, Any]) -> None:
        """Add the figures of a run."""
        self.seconds.append(facts["seconds"])
        self.accuracies.append(facts["accuracy"])
        self.curves.append([(at, accuracy) for at, accuracy in facts["curve"]])

    def at(self, moments: list[float]) -> list[float]:
        """Return the accuracy of each run at its moment in `moments` (seconds), or at its end."""
        return [
            final
            if moment > ended
            else max((at, accuracy) for at, accuracy in curve if at <= moment)[1]
            for curve, ended, final, moment in zip(
                self.curves, self.seconds, self.accuracies, moments, strict=True
            )
        ]

    def reached(self, accuracy: float) -> list[float]:
        """Return the seconds until an accuracy was reached, without the runs that never did."""
        found = [[at for at, value in curve if value >= accuracy] for curve in self.curves]
        return [ats[0] for ats in found if ats]


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
        found: list[dict[str, Any]] = lab.call(
            "benchmarks.plain_ranks:run", order, folder, limit_s=LIMIT_S
        )
    return found[-1 if server else 0]


def add_rows(out: r.Report, rows: dict[str, Runs]) -> None:
    """Add the rows of all systems to the report."""
    full = rows["Full"]
    half = [seconds / 2 for seconds in full.seconds]
    for name, found in rows.items():
        reached = found.reached(ENOUGH)
        ratios = [a / b for a, b in zip(full.seconds, found.seconds, strict=True)]
        out.rows.append(
            (
                name,
                r.middle(found.seconds),
                r.percent(r.spread(found.seconds)),
                r.middle(ratios),
                accuracy(found.accuracies),
                f"{min(found.accuracies):.4f} to {max(found.accuracies):.4f}",
                accuracy(found.at(half)),
                r.middle(reached) if reached else "not reached",
            )
        )
        out.details[name] = {"seconds": found.seconds, "curves": found.curves}


def accuracy(values: list[float]) -> str:
    """Return the median accuracy as text."""
    return f"{r.middle(values):.4f}"


def run(lab: Lab, given: Options) -> r.Report:
    """Run all systems and return the report."""
    size = Size(3, 1, 0.01) if given.smoke else Size(8, 30, 0.05)
    out = r.Report(
        "loads_digits",
        f"Digits, {size.ranks} ranks, {size.epochs} epochs, steps of the {LOAD.upper()}'s load x "
        f"{size.scale}",
        (
            *("system", "seconds", "spread", "Full/it", "accuracy after the epochs", "its range"),
            *("accuracy at half of Full's time", f"seconds to {100 * ENOUGH:.0f} %"),
        ),
        smoke=given.smoke,
    )
    rows = {name: Runs() for name in (*WAYS, *OTHERS)}
    hashes: list[str] = []
    equal = True
    for seed in range(1 if given.smoke else given.rounds):
        for mode in WAYS:
            ran = lab.run(plan(size, mode, seed))
            rows[mode].add(ran.probes[0])
            equal = equal and same_weights(ran)
            hashes.append(ran.probes[0]["hash"])
        for name, way in OTHERS.items():
            rows[name].add(other(lab, size, way, seed))
    add_rows(out, rows)
    out.checks["equal weights on all ranks, in every job"] = equal
    out.hashes["all jobs"] = r.one_hash(hashes)
    out.notes.append(
        "D-PSGD: the accuracy after the epochs is that of the mean of all ranks, those over time "
        "are of one rank's own weights"
    )
    out.notes.append(
        "the server is a further process; it applies 1/P of the learning rate per push"
    )
    return out


if __name__ == "__main__":
    main(run, __doc__)
