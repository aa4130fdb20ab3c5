"""Measure a pipeline's cost in convergence: digits and hyperplane after the same epochs (R36).

    python -m benchmarks.pipeline [--ranks 4] [--smoke]

The two examples run as real jobs, each with `collective.pipeline` 0 and 1. In Full, at the
example's learning rate and at four times that, the figures are the same in each run, whatever the
machine's load. Quorum runs three times, and the median is printed. The benchmark is about
convergence: its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from testing.temporary import temporary_folder

EXAMPLES: Final = Path(__file__).resolve().parent.parent / "examples"
PACELINE: Final = Path(sys.executable).parent / "paceline"
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
    script = EXAMPLES / task.example / "train.py"
    words = [sys.executable, str(script), f"--epochs={epochs}", f"--lr={lr}", *task.arguments]
    job = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": task.example},
        "spec": {
            "replicas": ranks,
            "collective": collective,
            "template": {
                "spec": {"containers": [{"name": "trainer", "image": "none", "command": words}]}
            },
        },
    }
    with temporary_folder() as folder:
        (folder / "job.json").write_text(json.dumps(job))
        at = ["--run-dir", str(folder / "run")]
        order = [str(PACELINE), "run", str(folder / "job.json"), *at, "--quiet"]
        ran = subprocess.run(order, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"{order}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
        return float(json.loads((folder / "run" / "result.json").read_text())[task.figure])


def main() -> None:
    """Run all jobs and print the table."""
    arguments = argparse.ArgumentParser(description="Convergence with and without a pipeline.")
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--smoke", action="store_true", help="one short job of each kind")
    given = arguments.parse_args()
    load = os.getloadavg()[0]
    print("| task | mode | learning rate | epochs | figure | pipeline 0 | pipeline 1 |")
    print("|---|---|---|---|---|---|---|")
    for task in SMOKE if given.smoke else TASKS:
        for mode, (settings, times) in MODES.items():
            once = times == 1  # a figure of several runs is measured at one setting only
            for lr in task.rates if once else task.rates[:1]:
                for epochs in task.epochs if once else task.epochs[-1:]:
                    figures = [
                        median(
                            train(task, given.ranks, settings | {"pipeline": p}, epochs, lr)
                            for _ in range(1 if given.smoke else times)
                        )
                        for p in (0, 1)
                    ]
                    cells = (task.example, mode, lr, epochs, task.figure)
                    told = [f"{x:.4f}" for x in figures]
                    print("|", " | ".join(map(str, (*cells, *told))), "|", flush=True)
    print(f"\n{given.ranks} ranks; load of the machine at the start: {load:.2f}.")


if __name__ == "__main__":
    main()
