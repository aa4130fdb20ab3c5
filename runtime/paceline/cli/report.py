"""`paceline report`: a page and a trace that show what the last steps of a job consisted of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.settings import CollectiveSettings
from paceline_api.times import NS_PER_MS
from paceline_api.types.enums import Mode

from paceline import private_files
from paceline.cli.choice import Where, choose
from paceline.cli.options import Job
from paceline.cli.output import say
from paceline.clock import wall_s
from paceline.core.anatomy.course import course
from paceline.core.anatomy.job import analyse, known_rounds, latest_rounds
from paceline.jobs.interface import Jobs

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
        str | None,
        typer.Option(help="Rounds of the time line, such as 100:120. Default: the last 12."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html and trace.json; else the run's, and of a cluster's job "
            "JOB-report."
        ),
    ] = None,
) -> int:
    """Write a report: slow ranks, advice, speed and loss, parts of a step; and a trace."""
    # Imported here, because no other command needs Jinja, which takes long to import.
    from paceline.report.page import About, advice_lines, page, silent_lines, verdict
    from paceline.report.trace import trace

    jobs = choose(job, where)
    samples = jobs.samples(job)
    anatomy = analyse(samples.pods, samples.silent)
    status = jobs.status(job)
    about = About(wall_s(), status.place, status.state, _mode_of(jobs, job))
    known = known_rounds(anatomy.ranks)
    chosen = _chosen(rounds, known) if rounds else latest_rounds(anatomy.ranks, ROUNDS)
    folder = out or Path(samples.folder or f"{job}-report")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            (PAGE, page(anatomy, about, course(samples.pods), chosen)),
            (TRACE, trace(anatomy, known)),
        ):
            private_files.write(folder / name, text.encode(), SHARED_MODE)
    except OSError as error:
        raise PacelineError(
            f"{folder}: {(error.strerror or str(error)).lower()}",
            hint="name a folder that you may write to with --out",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    say(
        f"job {anatomy.job}: {len(anatomy.ranks)} ranks, mode {about.mode}, "
        f"{anatomy.step_s * 1e3:.1f} ms per step"
    )
    for line in (verdict(anatomy), *advice_lines(anatomy), *silent_lines(anatomy)):
        say(f"  {line}")
    say(f"page: {folder / PAGE}")
    say(f"trace for https://ui.perfetto.dev: {folder / TRACE}")
    return 0


def _mode_of(jobs: Jobs, name: str) -> str:
    """Return the job's mode; that it is not known is no reason to fail."""
    try:
        return _mode(jobs.resolved(name).collective)
    except PacelineError:
        return "unknown"


def _mode(settings: CollectiveSettings) -> str:
    """Return the mode with the field that says when its rounds start."""
    match settings.mode:
        case Mode.QUORUM if settings.quorum_count is not None:
            return f"{settings.mode}, quorum {settings.quorum_count}"
        case Mode.QUORUM:
            return f"{settings.mode}, quorum {settings.quorum_percent}%"
        case Mode.DEADLINE if settings.deadline_ns is not None:
            return f"{settings.mode}, {settings.deadline_ns / NS_PER_MS:g} ms"
        case mode:
            return str(mode)


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
