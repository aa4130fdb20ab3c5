"""`paceline report`: a page and a trace that show what the last steps of a job consisted of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline import private_files
from paceline.cli.choice import Where, choose
from paceline.cli.options import Job
from paceline.cli.output import say
from paceline.core.anatomy.job import analyse, known_rounds, latest_rounds

ROUNDS: Final = 12
"""Upper bound on the rounds in the timeline, unless the user chooses others."""
PAGE: Final = "report.html"
TRACE: Final = "trace.json"
SHARED_MODE: Final = 0o666
"""Permissions of the files before the user's umask: a report is meant to be shared."""


def report(
    job: Job,
    where: Where,
    rounds: Annotated[
        str | None, typer.Option(help="Rounds of the time line, such as 100:120; else the last.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html and trace.json; else the run's, and of a cluster's job "
            "JOB-report."
        ),
    ] = None,
) -> int:
    """Show what the last steps of a job were made of: a page, and a trace for Perfetto."""
    # Imported here, because no other command needs Jinja, which takes long to import.
    from paceline.report.page import advice_lines, page, silent_lines
    from paceline.report.trace import trace

    found = choose(job, where).samples(job)
    anatomy = analyse(found.pods, found.silent)
    known = known_rounds(anatomy.ranks)
    chosen = _chosen(rounds, known) if rounds else latest_rounds(anatomy.ranks, ROUNDS)
    folder = out or Path(found.folder or f"{job}-report")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((PAGE, page(anatomy, chosen)), (TRACE, trace(anatomy, known))):
            private_files.write(folder / name, text.encode(), SHARED_MODE)
    except OSError as error:
        raise PacelineError(
            f"{folder}: {(error.strerror or str(error)).lower()}",
            hint="name a folder that you may write to with --out",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    say(f"job {anatomy.job}: {len(anatomy.ranks)} ranks, {anatomy.step_s * 1e3:.1f} ms a step")
    for line in (*advice_lines(anatomy), *silent_lines(anatomy)):
        say(f"  {line}")
    say(f"page: {folder / PAGE}")
    say(f"trace for https://ui.perfetto.dev: {folder / TRACE}")
    return 0


def _chosen(text: str, known: range) -> range:
    first, _, last = text.partition(":")
    try:
        chosen = range(int(first), int(last or first) + 1)
    except ValueError:
        chosen = range(0)
    # `known` comes from pods and may be huge, so it must not be iterated over.
    if max(chosen.start, known.start) >= min(chosen.stop, known.stop):
        raise PacelineError(
            f"--rounds {text}: known are {known.start} to {known.stop - 1}",
            hint=f"say for example --rounds {known.start}:{known.stop - 1}",
            exit_code=EXIT_BAD_INPUT,
        )
    return chosen
