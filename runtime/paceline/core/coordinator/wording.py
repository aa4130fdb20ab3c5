"""Words that several of the coordinator's messages share, such as a time of day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

NAMED_MAX: Final = 4
"""How many ranks one message names at most."""
GOES_ON: Final = "training goes on, the one before stays"
"""What follows a checkpoint that could not be written."""


def format_clock(wall_s: float) -> str:
    """Return the time of day, such as '14:05:09 UTC'."""
    return f"{datetime.fromtimestamp(wall_s, UTC):%H:%M:%S} UTC"


def named(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first names in a row, and how many more there are."""
    more = len(names) - NAMED_MAX
    listed = separator.join(names[:NAMED_MAX])
    return f"{listed} and {more} others" if more > 0 else listed
