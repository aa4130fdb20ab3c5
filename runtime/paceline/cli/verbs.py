"""The commands for one job in a cluster or on this machine: query the back end and print.

Each function returns the exit code of its command; errors are raised as PacelineError.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, PacelineError, show_value
from paceline_api.reading.load import load_job
from paceline_api.times import NS_PER_S
from paceline_api.types.durations import parse_duration

from paceline.cli.choice import Where, choose, choose_one, cluster
from paceline.cli.output import Output, console, print_data, say
from paceline.cli.status import follow
from paceline.clock import wall_s
from paceline.jobs.core import rendering
from paceline.jobs.interface import COMPLETE, JobStatus, Selection, Until


def submit(
    file: Path, where: Where, *, overrides: Sequence[str], output: Output | None, watch: bool
) -> int:
    """Start a job in a cluster and print its name; with `watch`, show it until it has ended."""
    job = load_job(file, overrides)
    if where.namespace is None:
        where = Where(job.metadata.namespace, where.context, where.kubeconfig)
    jobs = cluster(where)
    found = jobs.submit(job, folder=file.parent)
    if output is not None and output.is_data:
        print_data(found, output)
    else:
        say(f"job {found.name} is submitted to {jobs.where}")
    return exit_code(follow(jobs, found.name, output)) if watch else 0


def logs(
    name: str, where: Where, selection: Selection, *, follow: bool, times: bool, raw: bool
) -> int:
    """Print the selected log lines of a job."""
    screen = console()
    colour = screen.is_terminal and not screen.no_color
    lines = choose(name, where).logs(name, selection, follow=follow)
    try:
        for line in lines:
            text = rendering.log_line(line, colour=colour, times=times, raw=raw)
            sys.stdout.write(f"{text}\n")
            if follow:
                sys.stdout.flush()
    finally:
        lines.close()
    return 0


def wait(
    name: str, where: Where, until: Until, *, timeout: str | None, output: Output | None
) -> int:
    """Wait until a job meets a condition, and print its state."""
    timeout_s = None if timeout is None else seconds(timeout)
    found = choose(name, where).wait(name, until, timeout_s=timeout_s)
    if output is not None and output.is_data:
        print_data(found, output)
    else:
        message = found.message.partition("\n")[0]
        say(f"job {found.name}: {found.state}{f': {message}' if message else ''}")
    return exit_code(found)


def scale(name: str, where: Where, replicas: int) -> int:
    """Change the number of replicas of a job, and print it with the one before."""
    meant = choose_one(name, where)
    before = meant.jobs.scale(meant.name, replicas)
    say(f"job {name} of {meant.place}: {before} -> {replicas} replicas")
    return 0


def suspend(name: str, where: Where) -> int:
    """Stop a job after a checkpoint, and keep it."""
    meant = choose_one(name, where)
    meant.jobs.suspend(meant.name)
    say(f"job {name} of {meant.place} is being suspended; `paceline resume` starts it again")
    return 0


def resume(name: str, where: Where) -> int:
    """Start a suspended job again."""
    meant = choose_one(name, where)
    meant.jobs.resume(meant.name)
    say(f"job {name} of {meant.place} is resumed")
    return 0


def delete(name: str, where: Where, *, wait: bool, timeout: str) -> int:
    """End a job and remove it; with `wait`, wait until it is gone."""
    meant = choose_one(name, where)
    meant.jobs.delete(meant.name, wait_s=seconds(timeout) if wait else 0.0)
    say(f"job {name} of {meant.place} is deleted")
    return 0


def events(name: str, where: Where, output: Output | None) -> int:
    """Print the history of a job."""
    found = choose(name, where).events(name)
    if output is not None and output.is_data:
        print_data(found, output)
        return 0
    for text in rendering.events(found, wall_s(), wide=output is Output.WIDE):
        say(text)
    return 0


def explain(name: str, where: Where, output: Output | None) -> int:
    """Print why a job is slow or does not start, and what to type next."""
    found = choose(name, where).explain(name)
    if output is not None and output.is_data:
        print_data(found, output)
        return 0
    for text in rendering.explanation(found):
        say(text)
    return 0


def exit_code(status: JobStatus) -> int:
    """Return 1 for a job that has ended and is not Complete, otherwise 0."""
    return 0 if not status.ended or status.state == COMPLETE else EXIT_FAILURE


def seconds(text: str) -> float:
    """Return the seconds of a duration such as 10m, the value of --timeout.

    Args:
        text: The duration.

    Returns:
        Seconds.

    Raises:
        PacelineError: It is not a duration.
    """
    try:
        return parse_duration(text) / NS_PER_S
    except ValueError:
        raise PacelineError(
            f"--timeout: {show_value(text)} is not a duration",
            hint="write a number and a unit, such as 90s, 10m or 1h30m",
            exit_code=EXIT_BAD_INPUT,
        ) from None
