"""`paceline report`: what the last steps of a run were made of, as a page and as a trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline.core.anatomy.job import analyse, known_rounds
from paceline.local import index, steps
from paceline.report.page import advice_lines, page
from paceline.report.trace import trace

ROUNDS: Final = 12
"""That the time line shows, if nobody chooses others."""
PAGE: Final = "report.html"
TRACE: Final = "trace.json"


def report(name: str, rounds: str | None, out: Path | None) -> None:
    """`name`: a run folder, or a job that runs here. Writes two files and prints where."""
    run_dir = _run_dir(name)
    job = analyse(steps.of_run(run_dir))
    known = known_rounds(job.ranks)
    chosen = _chosen(rounds, known) if rounds else known[-ROUNDS:]
    folder = out or run_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PAGE).write_text(page(job, chosen))
        (folder / TRACE).write_text(trace(job, known))
    except OSError as error:
        raise PacelineError(
            f"{folder}: {(error.strerror or str(error)).lower()}",
            hint="name a folder that you may write to with --out",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    print(f"job {job.job}: {len(job.ranks)} ranks, {job.step_s * 1e3:.1f} ms a step")
    for line in advice_lines(job):
        print(f"  {line}")
    print(f"page: {folder / PAGE}")
    print(f"trace for https://ui.perfetto.dev: {folder / TRACE}")


def _run_dir(name: str) -> Path:
    named = [Path(entry.run_dir) for entry in index.running(os.environ) if entry.job == name]
    if len(named) > 1 and not Path(name).is_dir():
        listed = ", ".join(map(str, named))
        raise PacelineError(
            f"{len(named)} jobs with the name {name} are running",
            hint=f"name the run folder instead: {listed}",
            exit_code=EXIT_BAD_INPUT,
        )
    return Path(name) if Path(name).is_dir() or not named else named[0]


def _chosen(text: str, known: range) -> range:
    first, _, last = text.partition(":")
    try:
        chosen = range(int(first), int(last or first) + 1)
    except ValueError:
        chosen = range(0)
    if not set(chosen) & set(known):
        raise PacelineError(
            f"--rounds {text}: known are {known.start} to {known.stop - 1}",
            hint=f"say for example --rounds {known.start}:{known.stop - 1}",
            exit_code=EXIT_BAD_INPUT,
        )
    return chosen
