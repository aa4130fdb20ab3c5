"""Translation of pydantic's errors about a malformed job into errors in the terms of the API.

For a misspelled field the hint names the closest field that exists at its place. For a field known
from other operators it names the field that does the same here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline_api.defaults import model_of
from paceline_api.errors import MISSING, SpecError
from paceline_api.reading.yaml_text import Path, show_path
from paceline_api.types.job import TrainingJob
from paceline_api.types.model import COUNT_MAX, SPEC_PROBLEM, Model, OpenModel

ELSEWHERE: Final = {
    "completions": "replicas",
    "elasticPolicy": "minReplicas and maxReplicas",
    "lateGradients": "maxAgePolicy",
    "maxStaleness": "maxAge",
    "normalization": "normalisation",
    "nprocPerNode": "procsPerReplica",
    "numNodes": "replicas",
    "numProcPerNode": "procsPerReplica",
    "numWorkers": "replicas",
    "parallelism": "replicas",
    "runPolicy": "the same fields directly in spec",
    "slotsPerWorker": "procsPerReplica",
    "staleness": "maxAge",
    "workers": "replicas",
}
"""Field that does the same here, by names of other operators, papers and habits."""

_LISTED_MAX: Final = 8


def spec_errors(error: ValidationError, data: Mapping[str, Any]) -> list[tuple[Path, SpecError]]:
    """Return one error for each wrong field, in the order of the model.

    Args:
        error: The error of pydantic.
        data: The job as data.

    Returns:
        Pairs of path, by which the line can be found, and error.
    """
    by_path: dict[Path, SpecError] = {}
    for detail in error.errors(include_url=False):
        path = tuple(part for part in detail["loc"])
        if not _only_follows(path, detail, data):
            by_path.setdefault(path, _spec_error(path, detail, data))
    return list(by_path.items())


def _only_follows(path: Path, detail: ErrorDetails, data: Mapping[str, Any]) -> bool:
    """Return True if pydantic reports a consequence of another error as a further one."""
    if detail["type"] == "too_short":
        return bool(detail["input"])  # not empty: pydantic left out its wrong items
    if detail["type"] == "missing":
        model = model_at(path[:-1])  # a misspelled name is reported, except in an OpenModel
        closed = model is not None and not issubclass(model, OpenModel)
        return closed and _misspelt(path, data) is not None
    return False


def _spec_error(path: Path, detail: ErrorDetails, data: Mapping[str, Any]) -> SpecError:
    shown, value, context = show_path(path), detail["input"], detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            problem = f"is not a field of {_place(path[:-1])}"
            return SpecError(shown, MISSING, problem, hint=_other_name(path))
        case "missing":
            return SpecError(shown, MISSING, "is missing", hint=_missing_hint(path, data))
        case kind if kind == SPEC_PROBLEM:
            return SpecError(shown, value, context["problem"], hint=context["hint"])
        case "enum" | "literal_error":
            words = [word.strip("'") for word in _words(context.get("expected", ""))]
            return _not_one_of(shown, value, words)
        case "greater_than_equal":
            return SpecError(shown, value, f"is less than {context['ge']}", hint=_bounds_hint(path))
        case "greater_than":
            problem = f"is not more than {context['gt']}"
            return SpecError(shown, value, problem, hint=_bounds_hint(path))
        case "less_than_equal":
            return SpecError(shown, value, f"is more than {context['le']}", hint=_bounds_hint(path))
        case "too_short" | "string_too_short":
            hint = "give a value or remove the field"
            return SpecError(shown, MISSING, "is empty", hint=hint)
        case "too_long" | "string_too_long":
            most = context["max_length"]
            return SpecError(shown, value, "is too long", hint=f"use at most {most} entries")
        case kind:
            return _wrong_type(shown, value, kind, detail["msg"])


def _wrong_type(shown: str, value: Any, kind: str, reason: str) -> SpecError:
    if kind.startswith(("int", "float")):
        wanted = "a whole number" if kind.startswith("int") else "a number"
        quoted = isinstance(value, str) and value.strip().lstrip("-").isdecimal()
        hint = (
            f"write {value.strip()} without quotes" if quoted else f"write {wanted}, without a unit"
        )
        return SpecError(shown, value, f"is not {wanted}", hint=hint)
    if kind.startswith("bool"):
        return SpecError(shown, value, "is neither true nor false", hint="write true or false")
    if kind.startswith("string"):
        if isinstance(value, bool | int | float):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            return SpecError(shown, value, "is not text", hint=f'put it into quotes: "{text}"')
        return SpecError(shown, value, "is not text", hint="write a single word or text in quotes")
    if kind.startswith(("tuple", "list")):
        words = ", ".join(f'"{word}"' for word in str(value).split())
        hint = f"write [{words}]" if isinstance(value, str) else "write each item after a dash"
        return SpecError(shown, value, "is not a list", hint=hint)
    if kind.startswith(("model", "dict")):
        hint = "write its fields below it, indented, as `name: value`"
        return SpecError(shown, value, "is not a mapping", hint=hint)
    return SpecError(shown, value, f"cannot be used: {reason}", hint="see kubectl explain tj.spec")


def _not_one_of(shown: str, value: Any, words: list[str]) -> SpecError:
    by_lower = {word.lower(): word for word in words}
    close = difflib.get_close_matches(str(value).lower(), by_lower, n=1)
    hint = f"did you mean {by_lower[close[0]]}?" if close else f"write {words[0]}, for instance"
    return SpecError(shown, value, f"is not one of {', '.join(words)}", hint=hint)


def _words(expected: str) -> list[str]:
    return expected.replace(" or ", ", ").split(", ")


def _other_name(path: Path) -> str:
    name, model = str(path[-1]), model_at(path[:-1])
    if name in ELSEWHERE:
        return f"use {ELSEWHERE[name]} instead"
    fields = field_names(model) if model else []
    closest = closest_name(name, fields)
    if closest:
        return f"did you mean {closest}?"
    elsewhere = _parent_of(name)
    if elsewhere:
        return f"{name} belongs into {elsewhere}; check the indentation"
    rest = ", ..." if len(fields) > _LISTED_MAX else ""
    return f"its fields are {', '.join(fields[:_LISTED_MAX])}{rest}; remove this one"


def _missing_hint(path: Path, data: Mapping[str, Any]) -> str:
    misspelt = _misspelt(path, data)
    if misspelt:
        return f"did you mean {path[-1]} instead of {misspelt}?"
    return f"add {path[-1]} to {_place(path[:-1])}"


def _misspelt(path: Path, data: Mapping[str, Any]) -> str | None:
    """Return the unknown field beside a missing one that is probably a misspelling of it."""
    around: Any = data
    for part in path[:-1]:
        around = around[part]
    if not isinstance(around, Mapping):
        return None
    model = model_at(path[:-1])
    known = set(field_names(model)) if model else set()
    return closest_name(str(path[-1]), [key for key in around if key not in known])


def _bounds_hint(path: Path) -> str:
    """Return the whole allowed range, because the error names only one end of it."""
    names = [part for part in path if isinstance(part, str)]
    model = model_at(tuple(names[:-1]))
    schema = _property(model, names[-1]) if model else {}
    low = schema.get("minimum")
    high = schema.get("maximum")
    if low is None or high is None:
        return f"use more than {schema['exclusiveMinimum']} and at most {high}" if high else ""
    if high == COUNT_MAX:
        return f"use {low:g} or more"
    return f"use {low:g} to {high:g}"


def _property(model: type[Model], alias: str) -> dict[str, Any]:
    schema = _properties(model).get(alias, {})
    options = schema.get("anyOf", [schema])
    described: dict[str, Any] = options[0].get("items", options[0])
    return described


@cache
def _properties(model: type[Model]) -> dict[str, Any]:
    """Return a model's JSON schema, cached: it takes as long as reading a hundred jobs."""
    properties: dict[str, Any] = model.model_json_schema(by_alias=True)["properties"]
    return properties


def _place(path: Path) -> str:
    return show_path(path) or "a TrainingJob"


def closest_name(name: str, names: list[str]) -> str | None:
    """Return the entry of `names` that `name` is probably a misspelling of; or None."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else None


def field_names(model: type[Model]) -> list[str]:
    """Return the names of a model's fields, as in YAML."""
    return [field.alias or name for name, field in model.model_fields.items()]


def model_at(path: Path) -> type[Model] | None:
    """Return the model at a path; None for plain values and for what Paceline does not define."""
    model: type[Model] | None = TrainingJob
    for part in path:
        if isinstance(part, int):
            continue
        if model is None:
            return None
        by_alias = {field.alias: field for field in model.model_fields.values()}
        model = model_of(by_alias[part].annotation) if part in by_alias else None
    return model


def _parent_of(name: str) -> str | None:
    """Return the path of the only part with a field of this name; None if not exactly one."""
    places: list[str] = []

    def look(model: type[Model], path: Path) -> None:
        for field in model.model_fields.values():
            inner = model_of(field.annotation)
            alias = field.alias or ""
            if alias == name:
                places.append(show_path(path))
            if inner and alias not in ("template", "status", "metadata"):
                look(inner, (*path, alias))

    look(TrainingJob, ())
    return places[0] if len(places) == 1 else None
