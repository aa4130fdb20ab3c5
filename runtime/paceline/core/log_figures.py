"""The figures of the round log as a rank sends them: `LogStatus` as a flat map of numbers.

A field of `LogStatus` or `ShadowStatus` declares a figure: its meaning, its unit and whether it is
an integer. Its name in `messages.RankFigures.facts` follows from the field, so a new figure is one
field that `worker.metrics.heartbeat` fills. The figures are equal on all members at the same
version, so only the lowest active rank sends them (R42).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from msgspec import Struct
from paceline_api.status import LogStatus, ShadowStatus, as_number

PREFIX: Final = "log."
"""Beginning of the name of every figure of the log."""
_METRIC_SUM: Final = "log.metric_sum."
"""+ name given to `pl.log`: the first number in `LogStatus.metric_sums`."""
_METRIC_WEIGHT: Final = "log.metric_weight."
"""+ name given to `pl.log`: the second number."""
_IRREGULAR: Final = {
    "left_s": "seconds_left",
    "avoided_s": "wait_avoided_seconds",
    "shares": "share",
    "metrics": "metric",
    "metrics_of_epoch": "metric_epoch",
}
"""Names that do not follow from the field."""


class _Field(NamedTuple):
    field: str
    name: str
    """Name of the figure; if the field is a map, a prefix that each key is appended to."""
    is_map: bool
    is_whole: bool
    """True for integers; a figure is always sent as a float."""


def _fields(kind: type[Struct], prefix: str, apart: tuple[str, ...] = ()) -> tuple[_Field, ...]:
    fields = []
    for field, hint in get_type_hints(kind).items():
        if field in apart:
            continue
        stem = field.removesuffix("_s")
        regular = field if stem == field else f"{stem}_seconds"
        name = prefix + _IRREGULAR.get(field, regular)
        is_map, is_whole = get_origin(hint) is Mapping, hint is int or int in get_args(hint)
        fields.append(_Field(field, f"{name}." if is_map else name, is_map, is_whole))
    return tuple(fields)


_LOG: Final = _fields(LogStatus, PREFIX, apart=("shadow", "metric_sums"))
_SHADOW: Final = _fields(ShadowStatus, "log.shadow.")


def pack_log(log: LogStatus) -> dict[str, float]:
    """Return the figures of the log by name; a field that is None has no figure."""
    facts = _pack(log, _LOG)
    if log.shadow is not None:
        facts |= _pack(log.shadow, _SHADOW)
    for name, (total, weight) in log.metric_sums.items():
        facts[_METRIC_SUM + name] = as_number(total)
        facts[_METRIC_WEIGHT + name] = as_number(weight)
    return facts


def unpack_figures(facts: Mapping[str, float]) -> tuple[dict[str, float], LogStatus | None]:
    """Separate what a rank has measured about itself from what its log says.

    Args:
        facts: The figures as the rank sent them. A missing figure of the log gets the default of
            its field, and an unknown one is ignored.

    Returns:
        The rank's own figures by name. Its log's figures; None if it does not report them.
    """
    own = {name: value for name, value in facts.items() if not name.startswith(PREFIX)}
    if len(own) == len(facts):
        return own, None
    shadow = _unpack(facts, _SHADOW)
    sums = {
        name: (total, facts.get(_METRIC_WEIGHT + name, 0.0))
        for name, total in _group(facts, _METRIC_SUM).items()
    }
    return own, LogStatus(
        **_unpack(facts, _LOG),
        shadow=ShadowStatus(**shadow) if shadow.get("rounds") else None,
        metric_sums=sums,
    )


def _pack(status: Struct, fields: tuple[_Field, ...]) -> dict[str, float]:
    facts: dict[str, float] = {}
    for field, name, is_map, _ in fields:
        value = getattr(status, field)
        if is_map:
            for key, number in value.items():
                facts[name + key] = float(number)
        elif value is not None:
            facts[name] = float(value)
    return facts


def _unpack(facts: Mapping[str, float], fields: tuple[_Field, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, name, is_map, is_whole in fields:
        if is_map:
            group = _group(facts, name).items()
            values[field] = {key: round(value) if is_whole else value for key, value in group}
        elif name in facts:
            values[field] = round(facts[name]) if is_whole else facts[name]
    return values


def _group(facts: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in facts.items() if k.startswith(prefix)}
