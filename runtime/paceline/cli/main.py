"""`paceline`: the command line. It parses options, calls the commands and prints errors.

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
from pathlib import Path
from typing import Annotated

import typer
from paceline_api.errors import PacelineError

from paceline.cli.choice import RULE, Where
from paceline.cli.completion import complete_context, complete_job
from paceline.cli.output import Format, Output
from paceline.jobs.interface import Selection, Until

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Data-parallel training that continues when workers join, leave, fail or slow down.\n\n"
    + RULE,
)

JobFile = Annotated[Path, typer.Argument(help="YAML file with a TrainingJob.", metavar="JOB.YAML")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a field: --set spec.collective.mode=Full"
    ),
]
Job = Annotated[
    str,
    typer.Argument(
        help="Name of a job, or a run folder.", metavar="JOB", autocompletion=complete_job
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace in a cluster. Default: that of the context."),
]
Context = Annotated[
    str | None,
    typer.Option(
        help="Context of the kubeconfig. Default: the current one.", autocompletion=complete_context
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(help="Default: KUBECONFIG, ~/.kube/config, or the service account of a pod."),
]
OutputOption = Annotated[
    Output | None,
    typer.Option(
        "--output",
        "-o",
        help="Output format: json or yaml for programs, wide for more columns.",
        metavar="json|yaml|wide",
    ),
]

FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--output", "-o", help="Output format for programs, on stdout.", metavar="json|yaml"
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {importlib.metadata.version('paceline')}")
        raise typer.Exit


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


@app.command()
def run(
    file: JobFile,
    replicas: Annotated[
        int | None, typer.Option(help="Number of replicas. Default: spec.replicas.", min=1)
    ] = None,
    overrides: Overrides = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help="Inject a fault: slow:rank=2,ms=200  kill:rank=1,at=round:50  join:at=time:5s",
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
    output: FormatOption = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a job on this machine, with a process for each rank."""
    # Imported here, so that `validate` and `version` start fast.
    from paceline.cli import run as runs

    order = runs.Order(
        file,
        replicas=replicas,
        overrides=overrides or [],
        inject=inject or [],
        run_dir=run_dir,
        quiet=quiet,
        record=record,
        raw=raw,
        output=output,
    )
    raise typer.Exit(runs.detach(order) if detach else runs.run(order, ready_fd=ready_fd))


@app.command()
def validate(file: JobFile, overrides: Overrides = None, output: FormatOption = None) -> None:
    """Check a job file and report each error with its field and a hint."""
    from paceline.cli import validate as checks

    raise typer.Exit(checks.validate(file, overrides or [], output))


@app.command()
def submit(
    file: JobFile,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    overrides: Overrides = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Watch the job until it has ended.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Start a job in a cluster. To start one on this machine: `paceline run --detach`."""
    from paceline.cli import verbs

    where = Where(namespace, context, kubeconfig)
    code = verbs.submit(file, where, overrides=overrides or [], output=output, watch=watch)
    raise typer.Exit(code)


@app.command(epilog=RULE)
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
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Watch until the job has ended.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Show the state of a job, its ranks and rounds, and what delays it."""
    from paceline.cli.status import status as show_status

    where = Where(namespace, context, kubeconfig)
    raise typer.Exit(show_status(job, where, watch=watch, output=output))


@app.command(epilog=RULE)
def logs(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
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
) -> None:
    """Print the logs of all ranks, merged in order of time."""
    from paceline.cli import verbs

    selection = Selection(rank=rank, previous=previous, tail=tail)
    where = Where(namespace, context, kubeconfig)
    raise typer.Exit(verbs.logs(job, where, selection, follow=follow, times=timestamps, raw=raw))


@app.command(epilog=RULE)
def wait(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
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
) -> None:
    """Wait until a job has ended, trains or is suspended. Exit code 1: failed, 3: timed out."""
    from paceline.cli import verbs

    where = Where(namespace, context, kubeconfig)
    raise typer.Exit(verbs.wait(job, where, until, timeout=timeout, output=output))


@app.command(epilog=RULE)
def scale(
    job: Job,
    replicas: Annotated[int, typer.Option(help="The new number of replicas.", min=1)],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Change the number of replicas of a job."""
    from paceline.cli import verbs

    raise typer.Exit(verbs.scale(job, Where(namespace, context, kubeconfig), replicas))


@app.command(epilog=RULE)
def suspend(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop a job after a checkpoint and keep it for `resume`."""
    from paceline.cli import verbs

    raise typer.Exit(verbs.suspend(job, Where(namespace, context, kubeconfig)))


@app.command(epilog=RULE)
def resume(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Start a suspended job again, from its newest checkpoint if there is one."""
    from paceline.cli import verbs

    raise typer.Exit(verbs.resume(job, Where(namespace, context, kubeconfig)))


@app.command(epilog=RULE)
def delete(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    wait: Annotated[bool, typer.Option(help="Wait until all parts of the job are gone.")] = True,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="Time limit of the wait.")
    ] = "5m",
) -> None:
    """Delete a job with its logs; on this machine, its run folder. Checkpoints are kept."""
    from paceline.cli import verbs

    where = Where(namespace, context, kubeconfig)
    raise typer.Exit(verbs.delete(job, where, wait=wait, timeout=timeout))


@app.command(epilog=RULE)
def events(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = None,
) -> None:
    """Print the history of a job, the oldest first."""
    from paceline.cli import verbs

    raise typer.Exit(verbs.events(job, Where(namespace, context, kubeconfig), output))


@app.command(epilog=RULE)
def explain(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = None,
) -> None:
    """Explain why a job is slow or does not start, and which command to type next."""
    from paceline.cli import verbs

    raise typer.Exit(verbs.explain(job, Where(namespace, context, kubeconfig), output))


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run made with --record.")],
) -> None:
    """Run a recorded job again in one process and compare the weights."""
    from paceline.cli.replay import replay as replay_run

    raise typer.Exit(replay_run(run_dir))


@app.command(epilog=RULE)
def report(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
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
) -> None:
    """Write a report: slow ranks, advice, speed and loss, parts of a step; and a trace."""
    from paceline.cli.report import report as report_on

    report_on(job, Where(namespace, context, kubeconfig), rounds, out)


@app.command(epilog=RULE)
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
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    overrides: Overrides = None,
    output: OutputOption = None,
) -> None:
    """Predict the speed of a job at other sizes and in other modes."""
    from paceline.cli import plan as plans

    wanted = plans.Wanted(
        job=job,
        where=Where(namespace, context, kubeconfig),
        measure=measure,
        ranks=ranks,
        model=model,
        batch=batch,
        speedups=speedup or [],
        timeout=timeout,
        overrides=overrides or [],
    )
    raise typer.Exit(plans.plan(wanted, output))


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


def main() -> None:
    """Run the command line; print a PacelineError and exit with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape a character that the terminal's encoding lacks, instead of failing. A stream whose
        # descriptor was replaced since it was opened cannot be reconfigured.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except PacelineError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
