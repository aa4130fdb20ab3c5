"""Loading of a TrainingJob from YAML text; errors come with field and line.

The steps are: text to one mapping, `--set` overrides, kind and version, types and bounds of every
field, rules across fields. All errors of one step are reported together. The next step starts only
if there is none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, Final

from pydantic import ValidationError

from paceline_api.bounded import read_at_most
from paceline_api.errors import MISSING, InvalidJobError, JobFileError, SpecError
from paceline_api.reading.overrides import parse_override, with_overrides
from paceline_api.reading.problems import spec_errors
from paceline_api.reading.yaml_text import (
    Document,
    Path,
    read_document,
    read_documents,
    show_path,
)
from paceline_api.rules.validate import validate
from paceline_api.runtimes.merge import RUNTIME_REF, Runtime, errors_of, merge, place_of
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.fabric import FABRIC_KIND
from paceline_api.types.job import API_VERSION, GROUP, KIND, TrainingJob

__all__ = ["job_from_mapping", "load_job", "load_jobs", "parse_job", "with_overrides"]

FILE_BYTES_MAX: Final = 1_000_000
"""Upper bound on a job file in bytes. The API server accepts no object above about 1.5 MB."""

BESIDE: Final = (*RuntimeKind, FABRIC_KIND)
"""Kinds of Paceline that a file can have beside a job."""
GENERATED: Final = "x7k2p"
"""Five letters in place of those that the API server adds to `metadata.generateName`."""
SCRIPTS: Final = (".py", ".sh", ".ipynb")
Where = Callable[[Path], str]


def load_job(
    file: FilePath, overrides: Iterable[str] = (), runtime: Runtime | None = None
) -> TrainingJob:
    """Return the valid job in a file.

    An invalid job raises InvalidJobError; a file that is not one YAML mapping raises JobFileError.

    Args:
        file: Path of the file.
        overrides: Changes of single fields, as `path=value`.
        runtime: Runtime to merge the job with; None leaves a job as it is.

    Returns:
        The job.
    """
    text = text_of(file, "give the path of a YAML file with a TrainingJob")
    return parse_job(text, source=file.name, overrides=overrides, runtime=runtime)


def text_of(file: FilePath, hint: str) -> str:
    """Return the text of a YAML file.

    Args:
        file: Path of the file.
        hint: What to do if it cannot be read.

    Returns:
        The text.

    Raises:
        JobFileError: The file cannot be read, is not UTF-8, or is a script.
    """
    try:
        with file.open("rb") as stream:
            raw = read_at_most(stream, FILE_BYTES_MAX)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JobFileError(f"{file}: cannot be read: {reason}", hint=hint) from None
    if file.suffix in SCRIPTS or raw.startswith(b"#!"):
        raise JobFileError(f"{file}: is a script, not a job file", hint=_script_hint(file))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise JobFileError(f"{file}: is not UTF-8 text", hint=hint) from None


def _script_hint(file: FilePath) -> str:
    program = "bash" if file.suffix == ".sh" else "python"
    return (
        "write a job file whose container trainer has "
        f'command: ["{program}", "{file.name}"], and give its path; docs/get-started.md has one'
    )


def parse_job(
    text: str,
    *,
    source: str = "job",
    overrides: Iterable[str] = (),
    runtime: Runtime | None = None,
) -> TrainingJob:
    """Return the valid job in a text; other errors are as in `load_job`.

    Args:
        text: The YAML text.
        source: Name of the file, for errors.
        overrides: Changes of single fields, as `path=value`.
        runtime: Runtime to merge the job with; None leaves a job as it is.

    Returns:
        The job; merged with a runtime, it names none any more.

    Raises:
        InvalidJobError: A field is wrong.
    """
    try:
        document = read_document(text, source=source)
    except SpecError as error:
        raise InvalidJobError([error]) from None
    overrides = tuple(overrides)
    mapping = with_overrides(document.data, overrides)
    where = finder(document, source, overrides)
    if runtime is None:
        return _checked(mapping, where)
    return _merged(mapping, runtime, where, source)


def load_jobs(
    file: FilePath, overrides: Iterable[str] = (), runtime: Runtime | None = None
) -> list[TrainingJob | InvalidJobError]:
    """Return each job of a file, which may have several documents, as `kubectl create` takes it.

    Documents of other kinds, such as the claim of a job, are left out. A job with
    `metadata.generateName` has a name as the API server would make it. A file that is not YAML, or
    has no job, raises JobFileError.

    Args:
        file: Path of the file.
        overrides: Changes of single fields of every job, as `path=value`.
        runtime: Runtime to merge each job with; None leaves a job as it is.

    Returns:
        The valid jobs, and the errors of the others, in the order of the file.

    Raises:
        InvalidJobError: A key appears twice.
    """
    text = text_of(file, "give the path of a YAML file with a TrainingJob")
    try:
        documents = read_documents(text, source=file.name)
    except SpecError as error:
        raise InvalidJobError([error]) from None
    jobs = [each for each in documents if not _is_beside(each.data)] or documents
    overrides = tuple(overrides)
    results: list[TrainingJob | InvalidJobError] = []
    for document in jobs:
        mapping = _named(with_overrides(document.data, overrides))
        where = finder(document, file.name, overrides)
        try:
            if runtime is None:
                results.append(_checked(mapping, where))
            else:
                results.append(_merged(mapping, runtime, where, file.name))
        except InvalidJobError as error:
            results.append(error)
    return results


def _is_beside(mapping: Mapping[str, Any]) -> bool:
    """Return True for an object of another kind, in a file that may have jobs beside it."""
    kind = mapping.get("kind")
    return _is_of_another(kind, mapping.get("apiVersion")) or kind in BESIDE


def _named(mapping: dict[str, Any]) -> dict[str, Any]:
    metadata = mapping.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("name") is not None:
        return mapping
    prefix = metadata.get("generateName")
    if not isinstance(prefix, str):
        return mapping
    return {**mapping, "metadata": {**metadata, "name": prefix + GENERATED}}


def job_from_mapping(mapping: Mapping[str, Any], runtime: Runtime | None = None) -> TrainingJob:
    """Return the valid job in data of an API server or a program; may raise InvalidJobError.

    Args:
        mapping: The job as data.
        runtime: Runtime to merge the job with; None leaves a job as it is.

    Returns:
        The job; merged with a runtime, it names none any more.
    """
    if runtime is None:
        return _checked(mapping, lambda _: "")
    return _merged(mapping, runtime, lambda _: "", "the job")


def _merged(mapping: Mapping[str, Any], runtime: Runtime, where: Where, source: str) -> TrainingJob:
    """Return the valid job that a job and its runtime make together.

    Args:
        mapping: The job as data; it may name no other runtime.
        runtime: The runtime.
        where: Returns the place of a path in the job's file.
        source: Name of the job's file, for errors about the result of the merge.

    Returns:
        The job, which names no runtime any more.

    Raises:
        InvalidJobError: The job, or what both make together, is invalid.
    """
    spec = mapping.get("spec")
    written = dict(spec) if isinstance(spec, Mapping) else {}
    ref = written.setdefault(RUNTIME_REF, {"kind": runtime.kind, "name": runtime.name})
    _checked({**mapping, "spec": written}, where)  # errors of the job alone, with their lines
    kind, name = ref.get("kind") or RuntimeKind.CLUSTER, ref["name"]
    if (kind, name) != (runtime.kind, runtime.name):
        error = SpecError(
            f"spec.{RUNTIME_REF}",
            f"{kind} {name}",
            f"is not the runtime that is given, {runtime.title}",
            hint=f"give {kind} {name}, or change spec.{RUNTIME_REF}",
        )
        raise InvalidJobError([error.at(where(("spec", RUNTIME_REF)))])
    result = merge(runtime, without_nulls(written))
    if result.refused:
        raise InvalidJobError(
            error.at(where(("spec", *place_of(written, refused.path))))
            for error, refused in zip(
                errors_of(runtime, result.refused), result.refused, strict=True
            )
        )
    place = f"{source} with {runtime.title}"
    return _checked({**mapping, "spec": result.spec}, lambda _: place)


def _checked(mapping: Mapping[str, Any], where: Where) -> TrainingJob:
    errors = _kind_errors(mapping)
    if errors:
        raise InvalidJobError(error.at(where((error.path,))) for error in errors)
    faults = [
        SpecError(show_path(path), text, problem, hint=hint).at(where(path))
        for path, text, problem, hint in _unusable_texts(mapping)
    ]
    if faults:
        raise InvalidJobError(faults)
    given = without_nulls(mapping)
    try:
        job = TrainingJob.model_validate(given, by_alias=True, by_name=False)
    except ValidationError as error:
        wrong = spec_errors(error, given)
        raise InvalidJobError(fault.at(where(path)) for path, fault in wrong) from None
    faults = validate(job)
    if faults:
        raise InvalidJobError(fault.at(where(split_path(fault.path))) for fault in faults)
    return job


def _kind_errors(mapping: Mapping[str, Any]) -> list[SpecError]:
    """Return errors of kind and version; with those, all other errors would be noise."""
    errors: list[SpecError] = []
    kind, version = mapping.get("kind", MISSING), mapping.get("apiVersion", MISSING)
    if _is_of_another(kind, version):
        hint = f"give the path of a file with kind: {KIND} and apiVersion: {API_VERSION}"
        return [SpecError("kind", kind, f"of {version} is not a {KIND} of Paceline", hint=hint)]
    if version != API_VERSION:
        problem = "is missing" if version is MISSING else f"is not {API_VERSION}"
        close = difflib.get_close_matches(
            "apiVersion", [str(key) for key in mapping], n=1, cutoff=0.8
        )
        hint = f"write apiVersion: {API_VERSION}"
        if version is MISSING and close:
            hint = f"did you mean apiVersion instead of {close[0]}?"
        elif isinstance(version, str) and version.startswith(f"{GROUP}/"):
            hint += "; this release knows no other version"
        errors.append(SpecError("apiVersion", version, problem, hint=hint))
    if kind != KIND:
        problem = "is missing" if kind is MISSING else f"is not {KIND}"
        errors.append(SpecError("kind", kind, problem, hint=f"write kind: {KIND}"))
    return errors


def _is_of_another(kind: object, version: object) -> bool:
    """Return True for a whole object of another API: editing it would not make it a job."""
    texts = isinstance(kind, str) and isinstance(version, str)
    return texts and kind != KIND and not str(version).startswith(f"{GROUP}/")


def _unusable_texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the texts that no program argument, path or variable can hold.

    The kernel would end a text at a zero byte, and half of a surrogate pair cannot be encoded.

    Args:
        value: Data of the job.
        path: Path of `value`.

    Yields:
        Path, text, problem and hint.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unusable_texts(str(key), (*path, str(key)))
            yield from _unusable_texts(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unusable_texts(item, (*path, index))
    elif isinstance(value, str):
        if "\0" in value:
            yield path, value, "holds a zero byte", "remove it: write no \\0 in the text"
        elif _SURROGATE.search(value):
            yield (
                path,
                value,
                "holds half of a surrogate pair",
                "write the character itself, or \\U and its eight digits",
            )


_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def without_nulls(value: Any) -> Any:
    """Return data without fields that are None; as for the API server, they are not set."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def split_path(text: str) -> Path:
    """Return the path of a text; the inverse of `show_path`."""
    words = text.replace("[", ".[").split(".")
    parts = (word[1:-1] if word.startswith("[") else word for word in words)
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def finder(document: Document, source: str, overrides: tuple[str, ...] = ()) -> Where:
    """Return a function that says where in its file, or command line, a field is."""
    overridden = {parse_override(override)[0] for override in overrides}

    def where(path: Path) -> str:
        if any(path[: len(given)] == given for given in overridden):
            return "from the command line"
        line = document.line(path)
        return f"{source}, line {line}" if line else source

    return where
