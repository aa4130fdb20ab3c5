"""Phrases that several messages of the coordinator share, such as a time of day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

NAMED_MAX: Final = 4
"""Maximum number of ranks that one message names."""
GOES_ON: Final = "training goes on, the one before stays"
"""Ending of a message about a checkpoint that could not be written."""


def format_clock(wall_s: float) -> str:
    """Return the time of day, such as '14:05:09 UTC'."""
    return f"{datetime.fromtimestamp(wall_s, UTC):%H:%M:%S} UTC"


def named(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first names as a list in one string, and the number of the others."""
    more = len(names) - NAMED_MAX
    listed = separator.join(names[:NAMED_MAX])
    return f"{listed} and {more} others" if more > 0 else listed
