"""Sizes of the quorum and waiting times of each mode, as functions of the settings.

The trigger table (`core.protocol.trigger`) uses them for the mode in force, Shadow's report
(`core.protocol.shadow`) for all modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

DEADLINE_UNKNOWN_NS: Final = 0
"""Automatic deadline before any arrival offset was measured: start as soon as the quorum is met."""
PATIENCE_MIN_NS: Final = 10**6
"""Lower bound on what `patience_ns` returns: 1 ms."""
PATIENCE_SHARE: Final = 16
"""Divisor of the median round, which gives the upper bound on `patience_ns` (R41)."""


def quorum_of(mode: Mode, settings: RoundSettings, active: int) -> int:
    """Return k of R12 for a round that is not Full anyway: at most the number of active ranks."""
    match mode:
        case Mode.FULL | Mode.SHADOW:
            return active
        case Mode.MAJORITY:
            return active // 2 + 1
        case Mode.SOLO:
            return 1
        case Mode.QUORUM | Mode.DEADLINE:
            asked = settings.quorum or -(-active * settings.quorum_percent // 100) or active
            return max(1, min(asked, active))


def grace_ns(settings: RoundSettings, median_round_us: int) -> int:
    """Return how long to wait for nearly simultaneous ranks once the condition is met."""
    if settings.grace_ns >= 0:
        return settings.grace_ns
    return int(settings.grace_share * median_round_us * 1000)


def deadline_ns(settings: RoundSettings, recent_offsets_us: Iterable[int]) -> int:
    """Return the deadline: fixed, or median + c x MAD of recent arrivals (hivemind issue 676)."""
    if settings.deadline_ns:
        return settings.deadline_ns
    offsets = sorted(recent_offsets_us)
    if not offsets:
        return DEADLINE_UNKNOWN_NS
    median = offsets[len(offsets) // 2]
    spread = sorted(abs(x - median) for x in offsets)[len(offsets) // 2]
    return int((median + settings.deadline_factor * spread) * 1000)


def patience_ns(median_round_us: int, recent_offsets_us: Iterable[int]) -> int:
    """Return how long the head of a group may hold back announcements that decide nothing.

    Args:
        median_round_us: Median duration of recent rounds.
        recent_offsets_us: Arrival offsets of fresh ranks in recent rounds.

    Returns:
        Half of the time in which nine of ten ranks arrive, but at most a 16th of the median round,
        and at least 1 ms; in nanoseconds.
    """
    offsets = sorted(recent_offsets_us)
    spread_us = offsets[len(offsets) * 9 // 10] if offsets else 0
    bound_us = median_round_us // PATIENCE_SHARE
    return max(PATIENCE_MIN_NS, min(spread_us // 2, bound_us) * 1000)
