"""`paceline runtimes`, and the options that name a runtime: in a file, or in the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, SpecError
from paceline_api.runtimes.merge import Runtime
from paceline_api.runtimes.reading import load_runtime
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.job import TrainingJob

from paceline.cli.choice import Where, cluster
from paceline.cli.options import OutputOption
from paceline.cli.output import Output, is_printed_as_data, print_data, say

RuntimeFile = Annotated[
    Path | None,
    typer.Option(
        "--runtime", metavar="RUNTIME.YAML", help="File of the runtime that the job is merged with."
    ),
]
RuntimeName = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="[KIND/]NAME",
        help="Runtime of the cluster: spec.runtimeRef. KIND: ClusterTrainingRuntime, the default, "
        "or TrainingRuntime.",
    ),
]
COLUMNS: Final = ("NAME", "KIND", "READY", "DESCRIPTION")
DESCRIPTION_MAX: Final = 60
"""Characters of a description in the table; `-o wide` shows all."""


def runtimes(
    name: Annotated[
        str | None,
        typer.Argument(help="Runtime to print, as NAME or KIND/NAME.", metavar="[RUNTIME]"),
    ] = None,
    *,
    where: Where,
    output: OutputOption = None,
) -> int:
    """List the runtimes that jobs can name, or print one as YAML for `--runtime`."""
    jobs = cluster(where)
    if name is not None:
        kind, plain = parsed(name)
        manifest = jobs.runtime(kind, plain)
        print_data(manifest, output if output in (Output.JSON, Output.YAML) else Output.YAML)
        return 0
    rows = jobs.runtimes()
    if is_printed_as_data(rows, output):
        return 0
    if not rows:
        say(f"no runtime is in the {jobs.where}, and none in the whole cluster")
        return 0
    table = [
        COLUMNS,
        *((row.name, row.kind, row.ready, _short(row.description, output)) for row in rows),
    ]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS) - 1)]
    for line in table:
        cells = [text.ljust(width) for text, width in zip(line, widths, strict=False)]
        say("  ".join([*cells, line[-1]]).rstrip())
    for row in rows:
        if row.problem:
            say(f"{row.kind} {row.name}: {row.problem}", to_stderr=True)
    return 0


def _short(text: str, output: Output | None) -> str:
    if output is Output.WIDE or len(text) <= DESCRIPTION_MAX:
        return text
    return f"{text[: DESCRIPTION_MAX - 3]}..."


def parsed(text: str) -> tuple[RuntimeKind, str]:
    """Return kind and name of a runtime that is written as NAME or KIND/NAME.

    Args:
        text: The text; the kind may be in lower case, as for kubectl.

    Returns:
        Kind and name.

    Raises:
        PacelineError: There is no such kind, or no name.
    """
    kind, slash, name = text.rpartition("/")
    kinds = {each.lower(): each for each in RuntimeKind}
    if not name or (slash and kind.lower() not in kinds):
        raise PacelineError(
            f"--runtime: {text!r} names no runtime of a cluster",
            hint=f"write NAME or KIND/NAME, with KIND {' or '.join(RuntimeKind)}; "
            "`paceline runtimes` lists them",
            exit_code=EXIT_BAD_INPUT,
        )
    return kinds[kind.lower()] if slash else RuntimeKind.CLUSTER, name


def changes_of(runtime: str | None) -> list[str]:
    """Return the fields of a job that name a runtime, as `path=value`; none without one."""
    if runtime is None:
        return []
    if Path(runtime).suffix in (".yaml", ".yml", ".json"):
        raise PacelineError(
            f"--runtime: {runtime} is a file, and jobs of a cluster name a runtime of the cluster",
            hint=f"name one of `paceline runtimes`, or create this one: kubectl apply -f {runtime}",
            exit_code=EXIT_BAD_INPUT,
        )
    kind, name = parsed(runtime)
    return [f"spec.runtimeRef.kind={kind}", f"spec.runtimeRef.name={name}"]


def runtime_of(file: Path | None) -> Runtime | None:
    """Return the runtime in a file; None without a file. An invalid one raises PacelineError."""
    return None if file is None else load_runtime(file)


def check_whole(job: TrainingJob) -> None:
    """Check that a job can be run here, where no runtime is looked up.

    Args:
        job: The job, merged with the runtime that was given.

    Raises:
        SpecError: The job names a runtime, and none was given.
    """
    ref = job.spec.runtime_ref
    if ref is not None:
        kind = ref.kind or RuntimeKind.CLUSTER
        raise SpecError(
            "spec.runtimeRef",
            f"{kind} {ref.name}",
            "is a runtime of a cluster, and no file of it is given",
            hint="give it with --runtime runtime.yaml; "
            f"`paceline runtimes {kind}/{ref.name} > runtime.yaml` writes it",
        )
