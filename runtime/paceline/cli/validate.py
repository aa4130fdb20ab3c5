"""`paceline validate`: checks a job file, and prints the result for people or for programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct
from paceline_api.errors import EXIT_BAD_INPUT, InvalidJobError, PacelineError, SpecError
from paceline_api.reading.load import load_jobs
from paceline_api.types.job import TrainingJob

from paceline.cli.choice import Where, cluster
from paceline.cli.options import FormatOption, JobFile, Overrides
from paceline.cli.output import Format, is_printed_as_data, print_data, say
from paceline.cli.runtimes import RuntimeFile, runtime_of
from paceline.local.script import FIELD, missing_script


class Finding(Struct, frozen=True, kw_only=True):
    """An error or a warning about a job file."""

    message: str
    hint: str
    field: str = ""
    """Field of the job, such as `spec.replicas`; empty if the file as a whole is meant."""
    where: str = ""
    """Place in the file, such as `job.yaml, line 14`; empty if unknown."""


class Checked(Struct, frozen=True, kw_only=True):
    """Result of a check, as `paceline validate -o json` prints it."""

    file: str
    valid: bool
    job: str = ""
    """Name of the job; empty if the file is not valid."""
    errors: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()


def validate(
    file: JobFile,
    overrides: Overrides = None,
    runtime: RuntimeFile = None,
    against_cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Also ask the API server, which creates nothing: rules, webhooks, the runtime, "
            "the pods of a worker and of the coordinator as dry runs (pod security, limits), all "
            "pods together beside the quotas, and the Secrets, claims and other objects that they "
            "need.",
        ),
    ] = False,
    *,
    where: Where,
    output: FormatOption = None,
) -> int:
    """Check each job of a file and report each error with its field and a hint."""
    try:
        jobs = load_jobs(file, overrides or [], runtime_of(runtime))
    except PacelineError as error:
        if output is None:
            raise
        print_data(Checked(file=str(file), valid=False, errors=tuple(_findings(error))), output)
        return error.exit_code
    code = 0
    for job in jobs:
        if isinstance(job, TrainingJob):
            exit_code = (
                _ask_cluster(job, file, where, output)
                if against_cluster
                else _say_valid(job, file, runtime, output)
            )
        else:
            wrong = Checked(file=str(file), valid=False, errors=tuple(_findings(job)))
            if not is_printed_as_data(wrong, output):
                say(job.render(), to_stderr=True)
            exit_code = job.exit_code
        code = code or exit_code
    return code


def _say_valid(job: TrainingJob, file: Path, runtime: Path | None, output: Format | None) -> int:
    warnings = tuple(_warnings(job, file))
    right = Checked(file=str(file), valid=True, job=job.metadata.name, warnings=warnings)
    if is_printed_as_data(right, output):
        return 0
    for warning in warnings:
        say(f"warning: {warning.message}\nhint: {warning.hint}", to_stderr=True)
    with_runtime = f" with the runtime of {runtime}" if runtime else ""
    say(f"{file}: job {job.metadata.name} is valid{with_runtime}")
    return 0


def _ask_cluster(job: TrainingJob, file: Path, where: Where, output: Format | None) -> int:
    """Print what the API server would say to a job; return the exit code."""
    if where.namespace is None:
        where = Where(job.metadata.namespace, where.context, where.kubeconfig)
    jobs = cluster(where)
    checks = jobs.check(job)
    errors = tuple(Finding(message=c.message, hint=c.hint, field=c.field) for c in checks.wrong)
    unchecked = tuple(
        Finding(message=f"not checked: {c.message}", hint=c.hint, field=c.field)
        for c in checks.unchecked
    )
    name = job.metadata.name
    checked = Checked(file=str(file), valid=not errors, job=name, errors=errors, warnings=unchecked)
    code = EXIT_BAD_INPUT if errors else 0
    if is_printed_as_data(checked, output):
        return code
    for kind, rows in (("error", errors), ("warning", unchecked)):
        for row in rows:
            say(f"{kind}: {row.message}\nhint: {row.hint}", to_stderr=True)
    if not errors:
        say(f"{file}: job {name} is valid for the {jobs.where}")
    return code


def _findings(error: PacelineError) -> Iterator[Finding]:
    match error:
        case InvalidJobError():
            for each in error.errors:
                yield from _findings(each)
        case SpecError():
            yield Finding(
                message=error.message, hint=error.hint, field=error.path, where=error.where
            )
        case _:
            yield Finding(message=error.message, hint=error.hint)


def _warnings(job: TrainingJob, file: Path) -> Iterator[Finding]:
    if (ref := job.spec.runtime_ref) is not None:
        yield Finding(
            message=f"spec.runtimeRef: {ref.name} is not looked up, so the job is checked in parts",
            hint="give the file of the runtime with --runtime",
            field="spec.runtimeRef",
        )
    trainer = job.spec.trainer()
    if trainer is None or not trainer.command:
        return
    folder = (file.parent / (trainer.working_dir or ".")).resolve()
    command = [*(trainer.command or ()), *(trainer.args or ())]
    if script := missing_script(command, folder):
        yield Finding(
            message=f"{FIELD}: {script} is not in {folder}, so `paceline run` cannot start it",
            hint="in a cluster it is looked for in the image",
            field=FIELD,
        )
