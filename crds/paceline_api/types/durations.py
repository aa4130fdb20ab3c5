"""Durations and shares as people write them: `50ms`, `1m30s`, `75%`.

In YAML they are text, in the runtime whole nanoseconds and whole percents, so that every rank
computes the same number from the same file. The patterns are part of the CRD schema.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

# So few digits that no sum of parts leaves 63 bits, neither here nor in the API server's CEL.
DURATION_PATTERN: Final = r"^([0-9]{1,6}(\.[0-9]{1,6})?(ns|us|ms|s|m)|[0-9]{1,4}(\.[0-9]{1,6})?h)+$"
PERCENT_PATTERN: Final = r"^(0|[1-9][0-9]?|100)%$"
DURATION_CHARS_MAX: Final = 32

_PART: Final = re.compile(r"([0-9.]+)(ns|us|ms|s|m|h)")
_WHOLE: Final = re.compile(DURATION_PATTERN)
_PERCENT: Final = re.compile(PERCENT_PATTERN)
_UNITS_NS: Final = {
    "h": 3_600_000_000_000,
    "m": 60_000_000_000,
    "s": 1_000_000_000,
    "ms": 1_000_000,
    "us": 1_000,
    "ns": 1,
}


def parse_duration(text: str) -> int:
    """Nanoseconds of `50ms`, `1.5s` or `1h30m`, cut off below 1 ns. ValueError otherwise."""
    if len(text) > DURATION_CHARS_MAX or _WHOLE.fullmatch(text) is None:
        raise ValueError(f"not a duration: {text!r}")
    parts = _PART.findall(text)
    return int(sum(Decimal(number) * _UNITS_NS[unit] for number, unit in parts))


def format_duration(ns: int) -> str:
    """The shortest text that `parse_duration` reads back as the same number."""
    assert ns >= 0, ns
    if ns == 0:
        return "0s"
    parts: list[str] = []
    for unit, size in _UNITS_NS.items():
        count, ns = divmod(ns, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def parse_percent(text: str) -> int:
    """75 from `75%`; whole percents from 0 to 100. ValueError otherwise."""
    if _PERCENT.fullmatch(text) is None:
        raise ValueError(f"not a percentage: {text!r}")
    return int(text[:-1])
