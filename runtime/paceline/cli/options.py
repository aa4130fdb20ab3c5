"""Arguments and options that several commands share, and how a function becomes a command.

A command is a function that takes arguments and options and returns the exit code. Its parameter
`where` stands for the three options that name a cluster, and `fields` for those that change fields
of a job.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from paceline_api.errors import PacelineError

from paceline.cli.choice import RULE, Where, cluster
from paceline.cli.output import Format, Output
from paceline.cli.program import Program, ProgramCommand
from paceline.jobs.local import LocalJobs


def add(app: typer.Typer, command: Callable[..., int]) -> None:
    """Add a command to the command line, under the name of the function.

    The help of a command for a `job` ends with the rule for where a job is looked for. A command
    with `words` takes a script, and all words after the script are its arguments.

    Args:
        app: The command line.
        command: Returns the exit code.
    """
    own = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for each in own.parameters.values():
        named = each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += SEVERAL[each.name][0] if each.name in SEVERAL else [named]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name in own.parameters.keys() & SEVERAL:
            stands_for, made = SEVERAL[name]
            given[name] = made(**{each.name: given.pop(each.name) for each in stands_for})
        raise typer.Exit(command(**given))

    setattr(call, "__signature__", own.replace(parameters=parameters))  # noqa: B010
    app.command(
        cls=ProgramCommand if "words" in own.parameters else None,
        epilog=RULE if "job" in own.parameters else None,
    )(call)


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
ProgramFile = Annotated[
    str,
    typer.Argument(
        help="Script for torchrun, or a job file: .yaml, .yml, .json, or - for stdin.",
        metavar="SCRIPT.PY|JOB.YAML",
    ),
]
Script = Annotated[str, typer.Argument(help="Script for torchrun.", metavar="SCRIPT.PY")]
Words = Annotated[
    list[str] | None,
    typer.Argument(help="Words after a script are its own.", metavar="ARGUMENTS"),
]
IsModule = Annotated[
    bool, typer.Option("--module", "-m", help="The script is the name of a module, as for python.")
]
Procs = Annotated[
    int | None, typer.Option(help="Ranks of each replica: spec.procsPerReplica.", min=1)
]
Mode = Annotated[str | None, typer.Option(help="spec.collective.mode; Full for a script.")]
Quorum = Annotated[
    str | None, typer.Option(metavar="N|N%", help="spec.collective.quorum, for mode Quorum.")
]
Name = Annotated[str | None, typer.Option(help="Of the job; else made from that of the script.")]
Image = Annotated[str | None, typer.Option(help="Image of a pod, with Paceline and the script.")]
Gpus = Annotated[int, typer.Option(help="GPUs of each replica; each of its ranks has one.", min=0)]
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


@dataclass(frozen=True, slots=True)
class Fields:
    """The options that stand for fields of a job; None for one that was not given."""

    procs: int | None
    mode: str | None
    quorum: str | None
    name: str | None
    overrides: list[str] | None

    def changes(self, program: Program, replicas: int | None) -> list[str]:
        """Return the options as changes of fields; those of --set come last.

        A script trains in mode Full unless told otherwise, where a quorum has no meaning. So
        --quorum asks for mode Quorum, and the rules of a job decide.

        Args:
            program: What is run.
            replicas: Value of --replicas, which not all commands have alike.

        Returns:
            Changes, as `path=value`.
        """
        mode = self.mode
        if self.quorum is not None and program.is_script:
            mode = mode or "Quorum"
        fields = {
            "spec.replicas": replicas,
            "spec.procsPerReplica": self.procs,
            "spec.collective.mode": mode,
            "spec.collective.quorum": self.quorum,
            "metadata.name": self.name,
        }
        given = [f"{path}={value}" for path, value in fields.items() if value is not None]
        return [*given, *(self.overrides or ())]


SEVERAL: Final[dict[str, tuple[tuple[inspect.Parameter, ...], Callable[..., object]]]] = {
    "where": (CLUSTER, Where),
    "fields": (
        (
            _option("procs", Procs),
            _option("mode", Mode),
            _option("quorum", Quorum),
            _option("name", Name),
            _option("overrides", Overrides),
        ),
        Fields,
    ),
}
"""Parameters that stand for several options, and what is made of these."""
