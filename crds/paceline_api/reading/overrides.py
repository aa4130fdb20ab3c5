"""`--set spec.collective.mode=Full`: changes of single values in a job before it is parsed.

The path must exist in the API. Inside the pod template any path may be set, because Kubernetes' own
fields are not known here. Values are YAML, and an empty value removes the field.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from paceline_api.errors import MISSING, InvalidJobError, SpecError
from paceline_api.reading.problems import closest_name, field_names, model_at
from paceline_api.reading.yaml_text import Path, read_value, show_path
from paceline_api.types.model import OpenModel

_PART: Final = re.compile(r"([^.\[\]]+)((?:\[\d{1,4}\])*)(?:\.|$)")
_EXAMPLE: Final = "such as --set spec.collective.mode=Full"


def with_overrides(mapping: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a job with changed values.

    Args:
        mapping: The job as data.
        overrides: Changes, as `path=value`.

    Returns:
        A deep copy.

    Raises:
        InvalidJobError: Names all overrides that are wrong.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(mapping))
    errors: list[SpecError] = []
    for override in overrides:
        try:
            path, value = parse_override(override)
            _put(changed, path, value)
        except SpecError as error:
            errors.append(error)
    if errors:
        raise InvalidJobError(errors)
    return changed


def parse_override(override: str) -> tuple[Path, Any]:
    """Return path and value of an override.

    A path that is malformed or does not exist raises SpecError, too.

    Args:
        override: Text of the form `path=value`.

    Returns:
        The path and the value.

    Raises:
        SpecError: There is no `=`, or the value is not YAML.
    """
    text, equals, value_text = override.partition("=")
    text = text.strip()
    if not equals or not text:
        raise SpecError(
            f"--set {override}", MISSING, "has no =", hint=f"write path=value, {_EXAMPLE}"
        )
    path = _parse_path(text)
    _check_known(path)
    try:
        return path, read_value(value_text)
    except ValueError as error:
        problem = f"is not a YAML value ({str(error).splitlines()[0]})"
        hint = "put text with special characters into quotes inside the argument"
        raise SpecError(text, value_text, problem, hint=hint) from None


def _parse_path(text: str) -> Path:
    path: list[str | int] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None or (match.group(0).endswith(".") and match.end() == len(text)):
            hint = "write names with dots between them and list items as [0]"
            raise SpecError(text, MISSING, "is not a path to a field", hint=f"{hint}, {_EXAMPLE}")
        path.append(match.group(1))
        path += [int(index) for index in re.findall(r"\d+", match.group(2))]
        position = match.end()
    return tuple(path)


def _check_known(path: Path) -> None:
    for length, part in enumerate(path):
        model = model_at(path[:length])
        if isinstance(part, int):
            continue
        if model is None or part in field_names(model):
            if model is None and not _is_open(path[:length]):
                shown = show_path(path[: length + 1])
                problem = f"does not exist: {show_path(path[:length])} is a single value"
                raise SpecError(shown, MISSING, problem, hint=f"set {show_path(path[:length])}")
            continue
        if issubclass(model, OpenModel):
            return
        fields = field_names(model)
        meant = closest_name(part, fields)
        hint = (
            f"did you mean {show_path((*path[:length], meant))}?"
            if meant
            else (f"its fields are {', '.join(fields)}")
        )
        problem = f"is not a field of {show_path(path[:length]) or 'a TrainingJob'}"
        raise SpecError(show_path(path[: length + 1]), MISSING, problem, hint=hint)


def _is_open(path: Path) -> bool:
    """Return True if `path` is in a map that Kubernetes defines, such as labels or resources."""
    for length in range(len(path), 0, -1):
        model = model_at(path[:length])
        if model is not None:
            return issubclass(model, OpenModel)
    return False


def _put(mapping: dict[str, Any], path: Path, value: Any) -> None:
    place: Any = mapping
    for length, part in enumerate(path):
        last = length == len(path) - 1
        if isinstance(part, int):
            if not isinstance(place, list) or part >= len(place):
                size = len(place) if isinstance(place, list) else 0
                shown, problem = (
                    show_path(path[: length + 1]),
                    f"does not exist: the list has {size} {'item' if size == 1 else 'items'}",
                )
                raise SpecError(shown, MISSING, problem, hint="items are counted from 0")
        elif not isinstance(place, dict):
            shown = show_path(path[: length + 1])
            problem = f"does not exist: {show_path(path[:length])} is not a mapping"
            raise SpecError(shown, MISSING, problem, hint="name a list item as [0]")
        if not last:
            if isinstance(part, str) and place.get(part) is None:
                place[part] = [] if isinstance(path[length + 1], int) else {}
            place = place[part]
        elif value is None and isinstance(part, str):
            place.pop(part, None)
        else:
            place[part] = value
