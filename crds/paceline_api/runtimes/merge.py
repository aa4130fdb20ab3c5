"""The merge of a job's spec with the runtime that it names; a pure function on plain data.

Mappings are merged field by field. Lists whose items have a name (containers, variables, volumes,
mounts, ports) are merged item by item, and all other lists are one value. What only one of the two
sets is taken as it is. What both set differently is an override: the job wins if `mayOverride` of
the runtime names the field or a part that contains it; otherwise the runtime wins and the override
is refused.

Merging twice changes nothing, since a value that equals the runtime's is no override.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline_api.errors import SpecError, show_value

Parts = tuple[str, ...]
"""Path of a field below `spec`: names of fields, and keys of maps and of list items."""

RUNTIME_REF: Final = "runtimeRef"
OWN_FIELDS: Final = ("description", "mayOverride")
"""Fields of a runtime's spec that are no fields of a job."""
MAY_OVERRIDE: Final = (
    "template.spec.containers[trainer].image",
    "template.spec.containers[trainer].command",
    "template.spec.containers[trainer].args",
    "template.spec.containers[trainer].workingDir",
)
"""What a job may override if the runtime does not say."""
CONTAINERS: Final = ("containers", "initContainers")
KEYS: Final = {
    **dict.fromkeys(CONTAINERS, "name"),
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "claims": "name",
    "hostAliases": "ip",
}
"""Lists of a pod that are merged item by item, and the field by which items are the same."""
WHOLE: Final = (
    *("livenessProbe", "readinessProbe", "startupProbe", "postStart", "preStop"),
    *("seccompProfile", "appArmorProfile"),
)
"""Mappings of a pod that are one value: their fields exclude each other."""
_PART: Final = re.compile(r"\.?([^.\[\]]+)|\[([^\[\]]+)\]")
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*")
SHOWN_MAX: Final = 6
"""Upper bound on the entries of `mayOverride` that a message lists."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime as a merge needs it."""

    kind: str
    name: str
    spec: Mapping[str, Any]
    """spec of the runtime as data, without nulls."""

    @property
    def title(self) -> str:
        """Kind and name, for messages."""
        return f"{self.kind} {self.name}"

    @property
    def may_override(self) -> Sequence[str]:
        """Paths of the fields that a job may override."""
        paths: Sequence[str] | None = self.spec.get("mayOverride")
        return MAY_OVERRIDE if paths is None else paths


@dataclass(frozen=True, slots=True)
class RefusedOverride:
    """One override that the runtime does not allow."""

    path: Parts
    value: Any
    """What the job says."""
    kept: Any
    """What the runtime says, which stays."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge."""

    spec: dict[str, Any]
    """Spec of a job without `runtimeRef`; the runtime's value where an override is refused."""
    refused: tuple[RefusedOverride, ...] = ()


def merge(runtime: Runtime, written: Mapping[str, Any]) -> Merged:
    """Merge the spec that a user wrote with its runtime.

    Args:
        runtime: The runtime.
        written: `spec` of the job as data, without nulls; it is not changed.

    Returns:
        The spec in force, and the overrides that are refused.
    """
    below = {name: each for name, each in runtime.spec.items() if name not in OWN_FIELDS}
    above = {name: each for name, each in written.items() if name != RUNTIME_REF}
    merging = _Merging(tuple(parts_of(path) for path in runtime.may_override))
    return Merged(merging.mappings(below, above, ()), tuple(merging.refused))


def errors_of(runtime: Runtime, refused: Iterable[RefusedOverride]) -> list[SpecError]:
    """Return the errors of refused overrides, worded for the owner of the job."""
    listed = [f"spec.{path}" for path in runtime.may_override[:SHOWN_MAX]]
    more = ", ..." if len(runtime.may_override) > SHOWN_MAX else ""
    free = f"a job may override {', '.join(listed)}{more}" if listed else "it allows no override"
    return [
        SpecError(
            show_parts(("spec", *each.path)),
            each.value,
            f"overrides {show_value(each.kept)} of {runtime.title}, whose mayOverride does not "
            "name this field",
            hint=f"remove it from the job, or have the owners of the runtime allow it; {free}",
        )
        for each in refused
    ]


@dataclass(slots=True)
class _Merging:
    """One merge under way."""

    allowed: tuple[Parts, ...]
    refused: list[RefusedOverride] = field(default_factory=list)

    def mappings(
        self, below: Mapping[str, Any], above: Mapping[str, Any], path: Parts
    ) -> dict[str, Any]:
        """Return two mappings merged field by field; those of the runtime come first."""
        merged = dict(below)
        for name, value in above.items():
            inner = (*path, name)
            merged[name] = self._values(below[name], value, inner) if name in below else value
        if _is_container(path):
            _leave_arguments(merged, below, above)
        return merged

    def _values(self, below: Any, above: Any, path: Parts) -> Any:
        if _same(below, above):
            return above
        if isinstance(below, Mapping) and isinstance(above, Mapping) and path[-1] not in WHOLE:
            return self.mappings(below, above, path)
        key = KEYS.get(path[-1]) if path[0] == "template" else None
        if key is not None and _are_keyed(below, key) and _are_keyed(above, key):
            return self._lists(below, above, key, path)
        return self._chosen(below, above, path)

    def _lists(
        self,
        below: Sequence[Mapping[str, Any]],
        above: Sequence[Mapping[str, Any]],
        key: str,
        path: Parts,
    ) -> list[Any]:
        """Return two lists merged by a field of their items; new items come last.

        An item of the job whose key has appeared before in the job is added as it is, so that what
        Kubernetes makes of it is not decided here.
        """
        merged: list[Any] = list(below)
        places = {_key_of(item, key): place for place, item in reversed(list(enumerate(below)))}
        for item in above:
            name = _key_of(item, key)
            place = places.pop(name, None)
            if place is None:
                merged.append(item)
                continue
            inner = (*path, name)
            if path[-1] in CONTAINERS:
                merged[place] = self.mappings(merged[place], item, inner)
            elif not _same(merged[place], item):
                # A variable or volume has one source: two halves would be none.
                merged[place] = self._chosen(merged[place], item, inner)
        return merged

    def _chosen(self, below: Any, above: Any, path: Parts) -> Any:
        if any(path[: len(allowed)] == allowed for allowed in self.allowed):
            return above
        self.refused.append(RefusedOverride(path, above, below))
        return below


def _leave_arguments(
    merged: dict[str, Any], below: Mapping[str, Any], above: Mapping[str, Any]
) -> None:
    """Drop the runtime's arguments if the job brings a command of its own, without arguments.

    Kubernetes does the same with those of an image.
    """
    own = "command" in above and not _same(above["command"], below.get("command"))
    if own and "args" not in above and _same(merged["command"], above["command"]):
        merged.pop("args", None)


def _is_container(path: Parts) -> bool:
    return len(path) > 1 and path[0] == "template" and path[-2] in CONTAINERS


def _are_keyed(value: Any, key: str) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, Mapping) and isinstance(item.get(key), str | int) for item in value
    )


def _key_of(item: Mapping[str, Any], key: str) -> str:
    return str(item[key])


def _same(one: Any, other: Any) -> bool:
    """Return True if two values mean the same to Kubernetes: an amount may be a number or text."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, str | int) and isinstance(other, str | int):
        return str(one) == str(other)
    return bool(one == other)


def parts_of(path: str) -> Parts:
    """Return the parts of a path such as `template.spec.nodeSelector[pool]`, without `spec`."""
    return tuple(plain or keyed for plain, keyed in _PART.findall(path))


def show_parts(parts: Parts) -> str:
    """Return a path as text, with keys that are no plain names, and keys of lists, in brackets."""
    text = ""
    for place, part in enumerate(parts):
        keyed = place > 0 and parts[place - 1] in KEYS
        text += f"[{part}]" if keyed or not _PLAIN.fullmatch(part) else f".{part}"
    return text.removeprefix(".")


def place_of(written: Mapping[str, Any], parts: Parts) -> tuple[str | int, ...]:
    """Return the path at which a job says a field, with indexes instead of keys of lists.

    Args:
        written: `spec` of the job.
        parts: Path of a field that it says.

    Returns:
        The path below `spec`.
    """
    place: list[str | int] = []
    value: Any = written
    for number, part in enumerate(parts):
        if isinstance(value, list | tuple):
            key = KEYS[parts[number - 1]]
            index = next(i for i, item in enumerate(value) if _key_of(item, key) == part)
            place.append(index)
            value = value[index]
        else:
            place.append(part)
            value = value[part]
    return tuple(place)
