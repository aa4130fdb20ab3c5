"""The commands for one job in a cluster or on this machine: query the back end and print.

Each function returns the exit code of its command; errors are raised as PacelineError. The
annotations of its parameters are its arguments and options (`paceline.cli.options`), and its
docstring is the help of the command.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, PacelineError, show_value
from paceline_api.names import POD_RUN_DIR
from paceline_api.times import NS_PER_S
from paceline_api.types.durations import parse_duration

from paceline.cli.choice import Where, choose, choose_one, cluster
from paceline.cli.options import (
    Fields,
    Gpus,
    Image,
    IsModule,
    Job,
    OutputOption,
    ProgramFile,
    Words,
)
from paceline.cli.output import Output, console, is_printed_as_data, say
from paceline.cli.program import Program, UnrunnableScriptError
from paceline.cli.runtimes import RuntimeName, changes_of
from paceline.cli.status import follow as follow_status
from paceline.clock import wall_s
from paceline.jobs.core import rendering
from paceline.jobs.core.script_job import LAUNCH, default_image
from paceline.jobs.interface import COMPLETE, JobStatus, Selection, Until


def submit(
    file: ProgramFile,
    where: Where,
    words: Words = None,
    is_module: IsModule = False,
    *,
    replicas: Annotated[
        int | None, typer.Option(help="Number of replicas. Default: spec.replicas.", min=1)
    ] = None,
    fields: Fields,
    image: Image = None,
    gpus: Gpus = 0,
    runtime: RuntimeName = None,
    with_script: Annotated[
        bool, typer.Option("--with-script", help="Send the script, so that no image needs it.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Watch the job until it has ended.")
    ] = False,
    output: OutputOption = None,
) -> int:
    """Start a job in a cluster, of a file or a script. Here `paceline run --detach` does."""
    program = Program.of(file, words, is_module=is_module)
    changes = [*changes_of(runtime), *fields.changes(program, replicas)]
    files: dict[str, str] = {}
    if program.is_script:
        if with_script:
            program, files = program.sent(POD_RUN_DIR)
        elif image is None and runtime is None:
            raise UnrunnableScriptError(
                f"no image is named that has {program.file} in it",
                hint="name one with --image, or a --runtime whose image has it, or send the script "
                "along with --with-script; `paceline init --dockerfile` writes what makes an image",
            )
    elif image is not None or gpus or with_script:
        raise UnrunnableScriptError(
            "--image, --gpus and --with-script are for a script, and this is a job file",
            hint="write them into the file, or change its fields with --set",
        )
    job = program.job(LAUNCH, changes, image or ("" if runtime else default_image()), gpus)
    if where.namespace is None:
        where = Where(job.metadata.namespace, where.context, where.kubeconfig)
    jobs = cluster(where)
    name = jobs.submit(job, folder=program.folder, function=files)
    if not is_printed_as_data(name, output):
        say(f"job {name.name} is submitted to {jobs.where}")
    return exit_code(follow_status(jobs, name.name, output)) if watch else 0


def logs(
    job: Job,
    where: Where,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Stream new lines, also of new replicas, until the job has ended.",
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(help="Only this rank: slot x procsPerReplica + process.")
    ] = None,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Include replicas that were replaced.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(help="Begin with at most this many recent lines of each replica.", min=0),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Prefix each line with its time of day, UTC.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print lines unchanged, with escape sequences.")
    ] = False,
) -> int:
    """Print the logs of all ranks, merged in order of time."""
    screen = console()
    colour = screen.is_terminal and not screen.no_color
    selection = Selection(rank=rank, previous=previous, tail=tail)
    lines = choose(job, where).logs(job, selection, follow=follow)
    try:
        for line in lines:
            text = rendering.log_line(line, colour=colour, times=timestamps, raw=raw)
            sys.stdout.write(f"{text}\n")
            if follow:
                sys.stdout.flush()
    finally:
        lines.close()
    return 0


def wait(
    job: Job,
    where: Where,
    until: Annotated[
        Until,
        typer.Option(
            "--for",
            metavar="|".join(Until),
            help="What to wait for; training means with all replicas.",
        ),
    ] = Until.ENDED,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time limit, such as 90s or 10m. Default: none."),
    ] = None,
    output: OutputOption = None,
) -> int:
    """Wait until a job has ended, trains or is suspended. Exit code 1: failed, 3: timed out."""
    timeout_s = None if timeout is None else seconds(timeout)
    status = choose(job, where).wait(job, until, timeout_s=timeout_s)
    if not is_printed_as_data(status, output):
        message = status.message.partition("\n")[0]
        say(f"job {status.name}: {status.state}{f': {message}' if message else ''}")
    return exit_code(status)


def scale(
    job: Job,
    replicas: Annotated[int, typer.Option(help="The new number of replicas.", min=1)],
    where: Where,
) -> int:
    """Change the number of replicas of a job."""
    meant = choose_one(job, where)
    before = meant.jobs.scale(meant.name, replicas)
    say(f"job {job} of {meant.place}: {before} -> {replicas} replicas")
    return 0


def suspend(job: Job, where: Where) -> int:
    """Stop a job after a checkpoint and keep it for `resume`."""
    meant = choose_one(job, where)
    meant.jobs.suspend(meant.name)
    say(f"job {job} of {meant.place} is being suspended; `paceline resume` starts it again")
    return 0


def resume(job: Job, where: Where) -> int:
    """Start a suspended job again, from its newest checkpoint if there is one."""
    meant = choose_one(job, where)
    meant.jobs.resume(meant.name)
    say(f"job {job} of {meant.place} is resumed")
    return 0


def delete(
    job: Job,
    where: Where,
    wait: Annotated[bool, typer.Option(help="Wait until all parts of the job are gone.")] = True,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="Time limit of the wait.")
    ] = "5m",
) -> int:
    """Delete a job with its logs; on this machine, its run folder. Checkpoints are kept."""
    meant = choose_one(job, where)
    meant.jobs.delete(meant.name, wait_s=seconds(timeout) if wait else 0.0)
    say(f"job {job} of {meant.place} is deleted")
    return 0


def events(job: Job, where: Where, output: OutputOption = None) -> int:
    """Print the history of a job, the oldest first."""
    listed = choose(job, where).events(job)
    if not is_printed_as_data(listed, output):
        for text in rendering.events(listed, wall_s(), wide=output is Output.WIDE):
            say(text)
    return 0


def explain(job: Job, where: Where, output: OutputOption = None) -> int:
    """Explain why a job is slow or does not start, and which command to type next."""
    explanation = choose(job, where).explain(job)
    if not is_printed_as_data(explanation, output):
        for text in rendering.explanation(explanation):
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
