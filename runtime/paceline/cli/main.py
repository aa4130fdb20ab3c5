"""`paceline`: the command line with all its commands. It prints errors and sets the exit code.

A `PacelineError` is printed with its hint and without a traceback. Exit codes: 0 success, and the
job that was run or waited for is Complete; 1 the job failed, or a cluster or a run does not answer;
2 the job file, the command line, a name, a login or a permission is wrong; 3 a wait timed out; 130
ended by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from paceline_api.errors import PacelineError

from paceline.cli import verbs
from paceline.cli.checkpoint import convert
from paceline.cli.choice import RULE, Where
from paceline.cli.init import init
from paceline.cli.launch import launch
from paceline.cli.options import (
    Fields,
    FormatOption,
    IsModule,
    OutputOption,
    Overrides,
    ProgramFile,
    Words,
    add,
    complete_job,
)
from paceline.cli.program import Program
from paceline.cli.replay import replay
from paceline.cli.report import report
from paceline.cli.runtimes import RuntimeFile, runtimes
from paceline.cli.status import status
from paceline.cli.validate import validate

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Data-parallel training that continues when workers join, leave, fail or slow down.\n\n"
    + RULE,
)
_checkpoint = typer.Typer(no_args_is_help=True, help="Convert checkpoints.")


def version() -> int:
    """Print the version."""
    print(f"paceline {importlib.metadata.version('paceline')}")
    return 0


def _print_version(wanted: bool) -> None:
    if wanted:
        raise typer.Exit(version())


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options that come before the command."""


def run(
    file: ProgramFile,
    words: Words = None,
    is_module: IsModule = False,
    *,
    replicas: Annotated[
        int | None, typer.Option(help="Instead of spec.replicas; 1 for a script.", min=1)
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node",
            "--nproc_per_node",
            metavar="N|gpu|cpu|auto",
            help="As of torchrun, instead of --replicas: a number, or one for each device or CPU.",
        ),
    ] = None,
    fields: Fields,
    nnodes: Annotated[
        str, typer.Option(metavar="1", help="As of torchrun: this machine is the only one.")
    ] = "1",
    standalone: Annotated[  # noqa: ARG001
        bool, typer.Option("--standalone", help="As of torchrun: accepted, and always so.")
    ] = False,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help=("Inject a fault: slow:rank=2,ms=200  kill:rank=1,at=round:50  join:at=time:5s"),
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="New or empty folder for logs and results. Default: runs/JOB-N."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option(help="Print only events and the summary, no table.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Record the run for `paceline replay`.")
    ] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Print the output of ranks unchanged, with escape sequences."),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", "-d", help="Start the job in the background and return when it runs."
        ),
    ] = False,
    runtime: RuntimeFile = None,
    output: FormatOption = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> int:
    """Run a script as torchrun does, or the job of a file, with every rank a process here."""
    # Imported here, because all that runs a job takes longer to import than most commands take.
    from paceline.cli import run as runs

    program = Program.of(file, words, is_module=is_module)
    if nproc_per_node is not None:
        replicas = runs.replicas_of(nproc_per_node, replicas, fields.procs)
    order = runs.Order(
        program,
        nodes=nnodes,
        is_size_given=replicas is not None,
        overrides=fields.changes(program, replicas),
        inject=inject or [],
        run_dir=run_dir,
        quiet=quiet,
        record=record,
        raw=raw,
        output=output,
        runtime=runtime,
    )
    return runs.detach(order) if detach else runs.run(order, ready_fd=ready_fd)


def plan(
    job: Annotated[
        str,
        typer.Argument(
            help="YAML file with a TrainingJob, name of a job, or a run folder.",
            metavar="JOB",
            autocompletion=complete_job,
        ),
    ],
    measure: Annotated[
        bool,
        typer.Option("--measure", help="First run the job briefly at two or three sizes."),
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N", help="Numbers of ranks. Default: powers of two up to twice the job's."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="M,M", help="Ranks per copy of the model. Default: all that are known."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Samples per gradient. Default: as measured."),
    ] = None,
    speedup: Annotated[
        list[str] | None,
        typer.Option(metavar="M=X", help="A group of M ranks makes a step X times as fast."),
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="Time limit for measuring one size.")
    ] = "3m",
    *,
    where: Where,
    overrides: Overrides = None,
    output: OutputOption = None,
) -> int:
    """Predict the speed of a job at other sizes and in other modes."""
    from paceline.cli import plan as plans

    wanted = plans.PlanArguments(
        job=job,
        where=where,
        measure=measure,
        ranks=ranks,
        model=model,
        batch=batch,
        speedups=speedup or [],
        timeout=timeout,
        overrides=overrides or [],
    )
    return plans.plan(wanted, output)


for _command in (
    *(run, launch, init, validate, verbs.submit, status, verbs.logs, verbs.wait, verbs.scale),
    *(verbs.suspend, verbs.resume, verbs.delete, verbs.events, verbs.explain),
    *(replay, report, plan, runtimes, version),
):
    add(app, _command)
add(_checkpoint, convert)
app.add_typer(_checkpoint, name="checkpoint")


@cache
def _command_line() -> Callable[[], object]:
    """Return the command line as built from the signatures of all commands."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line; print a PacelineError and exit with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape a character that the terminal's encoding lacks, instead of failing. A stream whose
        # descriptor was replaced since it was opened cannot be reconfigured.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _command_line()()
    except PacelineError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
