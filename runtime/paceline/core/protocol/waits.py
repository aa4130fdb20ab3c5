"""How many ranks a mode needs and how long it waits: plain functions of the settings.

The trigger table (`core.protocol.trigger`) uses them for the mode in force, Shadow's report
(`core.protocol.shadow`) for all modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

DEADLINE_UNKNOWN_NS: Final = 0
"""Auto deadline before any arrival offset was seen: start with the minimum."""
PATIENCE_MIN_NS: Final = 10**6
PATIENCE_SHARE: Final = 16
"""Of a round, at most; the bound that R41 states."""


def quorum_of(mode: Mode, settings: RoundSettings, active: int) -> int:
    """k of R12 for a round that is not Full anyhow: never more than are active."""
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
    """The wait for near-simultaneous ranks once the condition holds."""
    if settings.grace_ns >= 0:
        return settings.grace_ns
    return int(settings.grace_share * median_round_us * 1000)


def deadline_ns(settings: RoundSettings, recent_offsets_us: Iterable[int]) -> int:
    """Fixed, or median + c x MAD of the recent arrival offsets (hivemind's issue 676)."""
    if settings.deadline_ns:
        return settings.deadline_ns
    offsets = sorted(recent_offsets_us)
    if not offsets:
        return DEADLINE_UNKNOWN_NS
    median = offsets[len(offsets) // 2]
    spread = sorted(abs(x - median) for x in offsets)[len(offsets) // 2]
    return int((median + settings.deadline_factor * spread) * 1000)


def patience_ns(median_round_us: int, recent_offsets_us: Iterable[int]) -> int:
    """How long the head of a group may keep what is far from deciding: half of the time in which
    nine of ten ranks arrive, but no more than a small part of a round."""
    offsets = sorted(recent_offsets_us)
    spread_us = offsets[len(offsets) * 9 // 10] if offsets else 0
    bound_us = median_round_us // PATIENCE_SHARE
    return max(PATIENCE_MIN_NS, min(spread_us // 2, bound_us) * 1000)
