"""Reading of runtimes: from files, and from the API server; and what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from paceline_api.errors import MISSING, InvalidJobError, JobFileError, SpecError
from paceline_api.reading.load import (
    finder,
    job_from_mapping,
    split_path,
    text_of,
    without_nulls,
)
from paceline_api.reading.problems import field_names, spec_errors
from paceline_api.reading.yaml_text import read_document
from paceline_api.runtimes.merge import CONTAINERS, KEYS, Runtime, merge, parts_of
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.job import API_VERSION, KIND, OwnSpec, SharedSpec
from paceline_api.types.runtime import TrainingRuntime
from paceline_api.types.template import TRAINER

_HINT: Final = (
    "give the path of a YAML file with a TrainingRuntime or ClusterTrainingRuntime; `paceline "
    "runtimes NAME -o yaml` prints one of the cluster"
)
SAMPLE_COMMAND: Final = "true"
"""Command of the job with which a runtime is tried."""


def load_runtime(file: Path) -> Runtime:
    """Return the valid runtime in a file.

    A file that is not one YAML mapping raises JobFileError.

    Args:
        file: Path of the file.

    Returns:
        The runtime.

    Raises:
        InvalidJobError: A field of the runtime is wrong.
    """
    document = read_document(text_of(file, _HINT), source=file.name)
    try:
        runtime = runtime_from_mapping(document.data)
        if errors := problems_of(runtime):
            raise InvalidJobError(errors)
    except InvalidJobError as error:
        where = finder(document, file.name)
        raise InvalidJobError(
            each.at(where(split_path(each.path))) for each in error.errors
        ) from None
    return runtime


def runtime_from_mapping(mapping: Mapping[str, Any]) -> Runtime:
    """Return a well-formed runtime from data.

    Args:
        mapping: The runtime as in YAML, or as the API server returns it.

    Returns:
        The runtime; `problems_of` says whether jobs can use it.

    Raises:
        JobFileError: The data is an object of another kind.
        InvalidJobError: A field is malformed.
    """
    kind, version = mapping.get("kind"), mapping.get("apiVersion")
    if version != API_VERSION or kind not in tuple(RuntimeKind):
        what = f"kind {kind} of {version}"
        if kind == KIND and version == API_VERSION:
            what = "a TrainingJob"
        raise JobFileError(f"this is {what}, and not a runtime", hint=_HINT)
    given = without_nulls({key: each for key, each in mapping.items() if key != "status"})
    errors = list(_fields_of_jobs(given.get("spec")))
    if errors:
        raise InvalidJobError(errors)
    try:
        TrainingRuntime.model_validate(given, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidJobError(fault for _, fault in spec_errors(error, given)) from None
    return Runtime(str(kind), str(given["metadata"]["name"]), given["spec"])


def _fields_of_jobs(spec: Any) -> Iterator[SpecError]:
    for name in field_names(OwnSpec) if isinstance(spec, Mapping) else ():
        if name in spec:
            yield SpecError(
                f"spec.{name}",
                MISSING,
                "is a field of jobs, and no runtime has it",
                hint="remove it; each job says it itself",
            )


def problems_of(runtime: Runtime) -> list[SpecError]:
    """Return what is wrong with a well-formed runtime, beyond what the API server checks.

    It is merged with a job that says as little as a job may: a command and, if the runtime's
    template has no container `trainer`, an image.

    Args:
        runtime: The runtime.

    Returns:
        The errors; empty if such a job is valid.
    """
    errors = [
        SpecError(
            "spec.mayOverride",
            path,
            problem,
            hint="write paths below spec, such as collective.mode or "
            "template.spec.containers[trainer].env",
        )
        for path in runtime.may_override
        if (problem := _unknown(runtime, path))
    ]
    sizes = [runtime.spec.get("minReplicas") or 1, *_allowed_sizes(runtime)]
    job = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "job"},
        "spec": _with_command(merge(runtime, {"replicas": max(sizes)}).spec),
    }
    try:
        job_from_mapping(job)
    except InvalidJobError as error:
        errors += error.errors
    return errors


def _allowed_sizes(runtime: Runtime) -> list[int]:
    elasticity = runtime.spec.get("elasticity") or {}
    return list(elasticity.get("allowedSizes") or ())


def _with_command(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a job, with a trainer and its command where they are left to jobs."""
    template = spec.get("template") or {}
    pod = template.get("spec") or {}
    containers = [dict(container) for container in pod.get("containers") or ()]
    trainer = next((c for c in containers if c.get("name") == TRAINER), None)
    if trainer is None:
        trainer = {"name": TRAINER, "image": "image"}
        containers.append(trainer)
    trainer.setdefault("command", [SAMPLE_COMMAND])
    return {**spec, "template": {**template, "spec": {**pod, "containers": containers}}}


def _unknown(runtime: Runtime, path: str) -> str:
    """Return why an entry of mayOverride can never allow anything; empty if it can."""
    parts = parts_of(path)
    if not parts or parts[0] not in field_names(SharedSpec):
        return "names no field that a job and a runtime have"
    for place, part in enumerate(parts[:-1]):
        inner = parts[place + 1]
        named = part in CONTAINERS and place == 2
        names = [c.get("name") for c in _containers(runtime, part)] if named else []
        if named and inner not in (*names, TRAINER):
            return f"names a container that is not in {part} of the runtime"
        if part in KEYS and part not in CONTAINERS and place + 2 < len(parts):
            return f"names a part of an item of {part}, which a job can override as a whole only"
    return ""


def _containers(runtime: Runtime, field: str) -> list[Mapping[str, Any]]:
    pod = (runtime.spec.get("template") or {}).get("spec") or {}
    return list(pod.get(field) or ())
