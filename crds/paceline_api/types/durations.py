"""Durations and percentages in their written form: `50ms`, `1m30s`, `75%`.

In YAML they are text; in the runtime they are whole nanoseconds and whole percents, so that every
rank computes the same number from the same file. The patterns are part of the CRD schema.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

# The few digits keep every sum of parts below 2**63, here and in the API server's CEL.
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
    """Return the nanoseconds of `50ms`, `1.5s` or `1h30m`; fractions of 1 ns are cut off.

    Args:
        text: The duration.

    Returns:
        Nanoseconds.

    Raises:
        ValueError: The text is not a duration.
    """
    if len(text) > DURATION_CHARS_MAX or _WHOLE.fullmatch(text) is None:
        raise ValueError(f"not a duration: {text!r}")
    parts = _PART.findall(text)
    return int(sum(Decimal(number) * _UNITS_NS[unit] for number, unit in parts))


def format_duration(ns: int) -> str:
    """Return the shortest text that `parse_duration` turns into the same number."""
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
    """Return 75 for `75%`.

    Args:
        text: A whole percentage from 0% to 100%.

    Returns:
        The number.

    Raises:
        ValueError: The text is not such a percentage.
    """
    if _PERCENT.fullmatch(text) is None:
        raise ValueError(f"not a percentage: {text!r}")
    return int(text[:-1])
