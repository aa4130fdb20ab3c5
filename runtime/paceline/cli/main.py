"""`paceline`: the command line. Parses, calls, prints; whoever made a mistake sees no traceback.

Exit codes: 0 the job is Complete (run) or valid (validate); 1 it failed; 2 the job file or the
command line is wrong; 130 ended by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer
from paceline_api.errors import PacelineError
from paceline_api.reading.load import load_job

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Data-parallel training that goes on when workers come, go, die or slow down.",
)

JobFile = Annotated[Path, typer.Argument(help="YAML file with a TrainingJob.", metavar="JOB.YAML")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a field: --set spec.collective.mode=Full"
    ),
]


@app.command()
def run(
    file: JobFile,
    replicas: Annotated[int | None, typer.Option(help="Instead of spec.replicas.", min=1)] = None,
    overrides: Overrides = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help="A fault on purpose: slow:rank=2,ms=200  kill:rank=1,at=round:50  join:at=time:5s",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="New or empty folder for logs and results; else runs/JOB-N."),
    ] = None,
    quiet: Annotated[bool, typer.Option(help="No table; events and the summary only.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep what `paceline replay` needs.")
    ] = False,
) -> None:
    """Run a job on this machine: every replica an agent, every rank a process."""
    # Imported here, so that `validate` and `version` start fast.
    from paceline.cli.run import run as run_job

    code = run_job(
        file,
        replicas=replicas,
        overrides=overrides or [],
        inject=inject or [],
        run_dir=run_dir,
        quiet=quiet,
        record=record,
    )
    raise typer.Exit(code)


@app.command()
def validate(file: JobFile, overrides: Overrides = None) -> None:
    """Check a job file; every error is named with its field and what to do."""
    job = load_job(file, overrides or [])
    print(f"{file}: job {job.metadata.name} is valid")


@app.command()
def status(
    job: Annotated[
        str | None, typer.Argument(help="Name of a running job, or a run folder.", metavar="[JOB]")
    ] = None,
    watch: Annotated[bool, typer.Option(help="Go on until the job has ended.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The whole status, for programs.")
    ] = False,
) -> None:
    """Show a job that runs on this machine, from any terminal of the same user."""
    from paceline.cli.status import status as show_status

    raise typer.Exit(show_status(job, watch=watch, as_json=as_json))


@app.command()
def scale(
    job: Annotated[str, typer.Argument(help="Name of a running job, or its run folder.")],
    replicas: Annotated[int, typer.Option(help="How many there shall be.", min=1)],
) -> None:
    """Change the number of replicas of a job that runs on this machine."""
    from paceline.cli.status import scale as scale_job

    scale_job(job, replicas)


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run made with --record.")],
) -> None:
    """Run a recorded job again in one process; the weights must come out the same."""
    from paceline.cli.replay import replay as replay_run

    raise typer.Exit(replay_run(run_dir))


@app.command()
def version() -> None:
    """Print the version."""
    print(f"paceline {importlib.metadata.version('paceline')}")


def main() -> None:
    try:
        app()
    except PacelineError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
