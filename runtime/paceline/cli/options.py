"""Arguments and options that several commands share, and how a function becomes a command.

A command is a function that takes arguments and options and returns the exit code. Its parameter
`where` stands for the three options that name a cluster.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from paceline_api.errors import PacelineError

from paceline.cli.choice import RULE, Where, cluster
from paceline.cli.output import Format, Output
from paceline.jobs.local import LocalJobs


def add(app: typer.Typer, command: Callable[..., int]) -> None:
    """Add a command to the command line, under the name of the function.

    The help of a command for a `job` ends with the rule for where a job is looked for.

    Args:
        app: The command line.
        command: Returns the exit code.
    """
    own = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for each in own.parameters.values():
        named = each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += CLUSTER if each.name == "where" else [named]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        if "where" in own.parameters:
            given["where"] = Where(**{each.name: given.pop(each.name) for each in CLUSTER})
        raise typer.Exit(command(**given))

    setattr(call, "__signature__", own.replace(parameters=parameters))  # noqa: B010
    app.command(epilog=RULE if "job" in own.parameters else None)(call)


# ---- shell completion; it prints no errors, because the user has not run a command yet ---------


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs on this machine and in the cluster that begin with `incomplete`.

    The cluster is that of the options, else that of the kubeconfig. With an option for a cluster,
    jobs on this machine are left out.

    Args:
        ctx: The command line so far.
        incomplete: Beginning of the name.

    Returns:
        Names; empty if nothing can be asked.
    """
    where = Where(**{each.name: ctx.params.get(each.name) for each in CLUSTER})
    names: list[str] = []
    try:
        names += [] if where.given else [job.name for job in LocalJobs().all()]
        names += [job.name for job in cluster(where).all()]
    except PacelineError:
        pass  # no cluster is configured, or it cannot be reached
    return [name for name in names if name.startswith(incomplete)]


def complete_context(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the contexts of the kubeconfig that begin with `incomplete`."""
    try:
        from paceline_api.access.login import contexts

        names = contexts(ctx.params.get("kubeconfig"))
    except (ModuleNotFoundError, PacelineError):
        return []
    return [name for name in names if name.startswith(incomplete)]


# ---- arguments and options ---------------------------------------------------------------------


def _option(name: str, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


CLUSTER: Final = (
    _option(
        "namespace",
        Annotated[
            str | None,
            typer.Option(
                "--namespace", "-n", help="Namespace in a cluster. Default: that of the context."
            ),
        ],
    ),
    _option(
        "context",
        Annotated[
            str | None,
            typer.Option(
                help="Context of the kubeconfig. Default: the current one.",
                autocompletion=complete_context,
            ),
        ],
    ),
    _option(
        "kubeconfig",
        Annotated[
            Path | None,
            typer.Option(
                help="Default: KUBECONFIG, ~/.kube/config, or the service account of a pod."
            ),
        ],
    ),
)
"""The options that make a `Where`."""
Job = Annotated[
    str,
    typer.Argument(
        help="Name of a job, or a run folder.", metavar="JOB", autocompletion=complete_job
    ),
]
JobFile = Annotated[Path, typer.Argument(help="YAML file with a TrainingJob.", metavar="JOB.YAML")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a field: --set spec.collective.mode=Full"
    ),
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
