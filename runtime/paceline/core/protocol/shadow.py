"""Shadow's report: what each partial mode would have saved and missed, from the arrival times.

Shadow trains as Full does, and every GO holds the arrival time of each rank. For each round, each
partial mode has a moment at which it would have started. All waiting after it would have been
saved, and a fresh gradient that came after it would have been late. Everything is a function of the
log, so it is the same on all ranks and survives any of them.

The report cannot know some things. A rank for which nobody waits goes on with other weights at
another time, so its later arrivals would not be those that were observed. A late gradient may be
dropped (`maxAge`). The grace and the deadline that follow from recent rounds are those of Full
rounds. So the report judges round by round: it is a forecast, not a promise. Rounds that are Full
in every mode (the first one, warm-up, `fullEvery`) save nothing. For a rank that never arrived
(bench) nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct
from paceline_api.rounds import RoundSettings
from paceline_api.times import NS_PER_US
from paceline_api.types.enums import Mode

from paceline.core.protocol.composition import Composition
from paceline.core.protocol.waits import deadline_ns, grace_ns, quorum_of

PARTIAL: Final = (Mode.QUORUM, Mode.MAJORITY, Mode.SOLO, Mode.DEADLINE)
"""Modes that the report compares."""


class Hindsight(Struct, frozen=True):
    """Savings and misses of one mode over the rounds so far."""

    saved_us: int = 0
    """Waiting time saved, summed over the ranks."""
    late: int = 0
    """Fresh contributions that would have missed their round."""

    def __add__(self, other: Hindsight) -> Hindsight:
        return Hindsight(self.saved_us + other.saved_us, self.late + other.late)


class ShadowReport(Struct, frozen=True):
    """Report over the rounds that ran in Shadow."""

    rounds: int = 0
    fresh: int = 0
    """Fresh contributions in these rounds."""
    waited_us: int = 0
    """Time that fresh ranks waited for the last one, summed over the ranks."""
    modes: dict[Mode, Hindsight] = {}


def follow(
    report: ShadowReport,
    made: Composition,
    settings: RoundSettings,
    active: int,
    median_round_us: int,
    recent_offsets_us: Iterable[int],
    *,
    full_anyhow: bool,
) -> ShadowReport:
    """Return the report with one more round.

    Args:
        report: Report over the rounds before.
        made: Composition of the round.
        settings: Settings of the round.
        active: Number of active ranks before the round.
        median_round_us: Median duration of the rounds before.
        recent_offsets_us: Arrival offsets of fresh ranks in the rounds before.
        full_anyhow: True if the round is Full in every mode.

    Returns:
        The new report.
    """
    fresh_us = sorted(made.arrivals.fresh_us)
    end_us = max([*fresh_us[-1:], *made.arrivals.idle_us], default=0)
    grace_us = grace_ns(settings, median_round_us) // NS_PER_US
    deadline_us = deadline_ns(settings, recent_offsets_us) // NS_PER_US
    modes = {}
    for mode in PARTIAL:
        k = active if full_anyhow else quorum_of(mode, settings, active)
        start_us = end_us
        if not full_anyhow and len(fresh_us) >= k:
            by_deadline = mode is Mode.DEADLINE
            start_us = fresh_us[k - 1] + (0 if by_deadline else grace_us)
            if by_deadline:
                start_us = max(start_us, fresh_us[0] + deadline_us)
        modes[mode] = report.modes.get(mode, Hindsight()) + hindsight(fresh_us, end_us, start_us)
    return ShadowReport(
        rounds=report.rounds + 1,
        fresh=report.fresh + len(fresh_us),
        waited_us=report.waited_us + sum(end_us - x for x in fresh_us),
        modes=modes,
    )


def hindsight(fresh_us: Sequence[int], end_us: int, start_us: int) -> Hindsight:
    """Return the saving of one round that started at `end_us` and could have at `start_us`."""
    late = [x for x in fresh_us if x > start_us]
    # Ranks that had arrived would have waited until the start. Late ranks would not have waited.
    on_time = len(fresh_us) - len(late)
    saved_us = on_time * max(0, end_us - start_us) + sum(end_us - x for x in late)
    return Hindsight(saved_us, len(late))
