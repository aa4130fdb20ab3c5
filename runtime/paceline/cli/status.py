"""`paceline status`: one job as the table of its run, or all jobs of a place as a list."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Annotated, Final

import typer
from paceline_api.errors import EXIT_FAILURE, printable_lines
from rich.console import Console
from rich.live import Live

from paceline import clock
from paceline.cli.choice import Where, choose, cluster
from paceline.cli.options import OutputOption, complete_job
from paceline.cli.output import Output, console, is_printed_as_data, say
from paceline.cli.table import line, table
from paceline.jobs.core import rendering
from paceline.jobs.errors import NoSuchJobError
from paceline.jobs.interface import TRAINING, Jobs, JobStatus
from paceline.jobs.local import LocalJobs

WATCH_S: Final = 0.5
"""Seconds between two updates of the table."""
LINE_S: Final = 1.0
"""Seconds between two lines where the output is not a terminal."""
OLD_S: Final = 5.0
"""Age in seconds from which on the figures of a cluster's job are marked as old."""


def status(
    job: Annotated[
        str | None,
        typer.Argument(
            help="Name of a job, or a run folder. Without it the jobs of a namespace with -n or "
            "--context, else those that run on this machine.",
            metavar="[JOB]",
            autocompletion=complete_job,
        ),
    ] = None,
    *,
    where: Where,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Watch until the job has ended.")
    ] = False,
    output: OutputOption = None,
) -> int:
    """Show the state of a job, its ranks and rounds, and what delays it."""
    if job is not None:
        jobs = choose(job, where)
    else:
        jobs = cluster(where) if where.given else LocalJobs()
        statuses = jobs.all()
        if where.given or len(statuses) != 1:
            return _list(jobs, statuses, output)
        job = statuses[0].place
    if watch:
        follow(jobs, job, output)
    else:
        _show(console(), jobs.status(job), output)
    return 0


def follow(jobs: Jobs, name: str, output: Output | None) -> JobStatus:
    """Show a job until it has ended.

    Args:
        jobs: The back end.
        name: The job.
        output: Format of the output; None prints a table on a terminal, otherwise lines.

    Returns:
        The last status.

    Raises:
        NoSuchJobError: The job was deleted before its first status.
    """
    screen, last, shown = console(), None, ""
    with ExitStack() as stack:
        live = None
        if screen.is_terminal and output in (None, Output.WIDE):
            live = stack.enter_context(Live(console=screen, auto_refresh=False))
        for status in stack.enter_context(closing(jobs.watch(name))):
            last = status
            if is_printed_as_data(status, output):
                continue
            if live is not None:
                live.update(table(status.detail, status, wide=output is Output.WIDE), refresh=True)
                clock.pause(WATCH_S)  # nobody can read more frequent updates
            elif (text := f"{_state(status)}{line(status.detail, status)}") != shown:
                screen.print(printable_lines(text))
                shown = text
                clock.pause(LINE_S)
    if last is None:
        raise NoSuchJobError(f"job {name} was deleted just now", hint="submit it again")
    return last


def _show(screen: Console, status: JobStatus, output: Output | None) -> None:
    if is_printed_as_data(status, output):
        return
    place = status.place
    where = f"logs in {place}" if place.startswith("/") else f"namespace {place}"
    old = f"  figures {rendering.age(status.told_s)} old" if status.told_s >= OLD_S else ""
    lines = [f"job {status.name}: {_state(status)}{where}{old}", status.message]
    lines += [f"hint: {status.hint}"] if status.hint else []
    for text in filter(None, lines):
        screen.print(printable_lines(text))
    if status.detail is not None:
        screen.print(table(status.detail, status, wide=output is Output.WIDE))


def _state(status: JobStatus) -> str:
    return "" if status.state == TRAINING else f"{status.state}  "


def _list(jobs: Jobs, statuses: Sequence[JobStatus], output: Output | None) -> int:
    if not is_printed_as_data(statuses, output):
        for text in rendering.jobs(statuses, wide=output is Output.WIDE):
            say(text)
    if not statuses:
        say(f"no job is running: {jobs.where}", to_stderr=True)
    return 0 if statuses else EXIT_FAILURE
