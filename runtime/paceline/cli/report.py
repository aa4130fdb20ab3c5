"""`paceline report`: a page and a trace that show what the last steps of a job consisted of."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.settings import CollectiveSettings
from paceline_api.times import NS_PER_MS
from paceline_api.types.enums import Mode

from paceline import private_files
from paceline.cli.choice import Where, choose
from paceline.cli.output import say
from paceline.clock import wall_s
from paceline.core.anatomy.course import course
from paceline.core.anatomy.job import analyse, known_rounds, latest_rounds
from paceline.jobs.interface import Jobs
from paceline.report.page import About, advice_lines, page, silent_lines, verdict
from paceline.report.trace import trace

ROUNDS: Final = 12
"""Upper bound on the rounds in the timeline, unless the user chooses others."""
PAGE: Final = "report.html"
TRACE: Final = "trace.json"
SHARED_MODE: Final = 0o666
"""Permissions of the files before the user's umask: a report is meant to be shared."""


def report(name: str, where: Where, rounds: str | None, out: Path | None) -> None:
    """Write report.html and trace.json, and print a summary and their paths.

    Args:
        name: Name of the job, or path of a run folder.
        where: Options that name a cluster.
        rounds: Rounds of the timeline, as FIRST:LAST; None takes the latest `ROUNDS`.
        out: Folder for the files; None takes the run folder, or NAME-report for a job in a cluster.

    Raises:
        PacelineError: The folder cannot be written to.
    """
    jobs = choose(name, where)
    found = jobs.samples(name)
    job = analyse(found.pods, found.silent)
    about = _about(jobs, name)
    known = known_rounds(job.ranks)
    chosen = _chosen(rounds, known) if rounds else latest_rounds(job.ranks, ROUNDS)
    folder = out or Path(found.folder or f"{name}-report")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name_of, text in (
            (PAGE, page(job, about, course(found.pods), chosen)),
            (TRACE, trace(job, known)),
        ):
            private_files.write(folder / name_of, text.encode(), SHARED_MODE)
    except OSError as error:
        raise PacelineError(
            f"{folder}: {(error.strerror or str(error)).lower()}",
            hint="name a folder that you may write to with --out",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    say(
        f"job {job.job}: {len(job.ranks)} ranks, mode {about.mode}, "
        f"{job.step_s * 1e3:.1f} ms per step"
    )
    for line in (verdict(job), *advice_lines(job), *silent_lines(job)):
        say(f"  {line}")
    say(f"page: {folder / PAGE}")
    say(f"trace for https://ui.perfetto.dev: {folder / TRACE}")


def _about(jobs: Jobs, name: str) -> About:
    """Return what the page says of the job itself; what is not known is no reason to fail."""
    try:
        mode = _mode(jobs.resolved(name).collective)
    except PacelineError:
        mode = "unknown"
    status = jobs.status(name)
    return About(wall_s(), status.place, status.state, mode)


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
