"""Measure a pipeline's cost in convergence: digits and hyperplane after the same epochs (R36).

The two examples run as real jobs, each with `collective.pipeline` 0 and 1. In Full, at the
example's learning rate and at four times that, the figures are the same in each run, whatever the
machine's load. Quorum runs three times, and the median is printed. The benchmark is about
convergence: its times mean nothing.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

from benchmarks.harness import Report, benchmark, interleave, middle
from benchmarks.jobs import ROOT, manifest, run_job
from testing.temporary import temporary_folder

LIMIT_S: Final = 1800.0
MODES: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "Full": ({"mode": "Full"}, 1),
    "Quorum(75 %)": ({"mode": "Quorum", "quorum": "75%", "maxAge": 0}, 3),
}
"""Collective settings of each mode, and how often it is run."""


class Task(NamedTuple):
    """Example, and the epochs and learning rates to run it with."""

    example: str
    figure: str
    """Name of the figure in the example's result file."""
    arguments: tuple[str, ...]
    epochs: tuple[int, ...]
    rates: tuple[float, ...]


TASKS: Final = (
    Task("digits", "accuracy", (), (3, 30), (0.05, 0.2)),
    Task(
        "hyperplane",
        "loss",
        ("--points", "8192", "--dimensions", "2048", "--batch-size", "128"),
        (8, 48),
        (0.02, 0.08),
    ),
)
SMOKE: Final = (Task("digits", "accuracy", (), (1,), (0.05,)),)


def train(task: Task, ranks: int, collective: dict[str, Any], epochs: int, lr: float) -> float:
    """Run a job and return its figure after `epochs` epochs."""
    example = str(ROOT / "examples" / task.example / "train.py")
    words = [sys.executable, example, f"--epochs={epochs}", f"--lr={lr}", *task.arguments]
    job = manifest(words, replicas=ranks, collective=collective)
    with temporary_folder() as folder:
        result = run_job(job, folder, limit_s=LIMIT_S) / "result.json"
        return float(json.loads(result.read_text())[task.figure])


@benchmark(
    "Convergence with and without a pipeline",
    ("task", "mode", "learning rate", "epochs", "figure", "pipeline 0", "pipeline 1"),
    {"--ranks": {"type": int, "default": 4}},
)
def run(out: Report) -> None:
    """Run all jobs; a figure of several runs is measured at one setting only."""
    for task in SMOKE if out.smoke else TASKS:
        for mode, (settings, times) in MODES.items():
            rates, epochs = (task.rates, task.epochs)
            if times > 1:
                rates, epochs = rates[:1], epochs[-1:]
            for lr, many in product(rates, epochs):
                sides = {
                    str(p): partial(
                        train, task, out.given.ranks, {**settings, "pipeline": p}, many, lr
                    )
                    for p in (0, 1)
                }
                results = interleave(1 if out.smoke else times, sides)
                figures = (f"{middle(results[p]):.4f}" for p in sides)
                out.rows.append((task.example, mode, lr, many, task.figure, *figures))
                out.samples[f"{task.example}, {mode}, {lr}, {many} epochs"] = results
