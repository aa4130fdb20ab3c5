"""What the head of a group has heard for a round and not passed on yet (R41).

The first announcement goes on at once, then as many together as have gone before, so that a group
of n costs the starter about log n messages and a round that starts early learns of it early. What
is out of the ordinary is never held back, nor is what completes the group; the rest waits for a
short while at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.messages import Announce, Gathered, Word
from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.bits import chosen, unpack_offsets
from paceline.core.protocol.composition import is_usual, pack_usual
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, Share

HOLD_MIN_NS: Final = 10**6
HOLD_SHARE: Final = 32
"""Held back for at most the 32nd part of a round."""


class Collector:
    """Of one head, for round `log.version`."""

    def __init__(self, log: Log, number: int, group: Sequence[MemberId]) -> None:
        self._log = log
        self._number = number
        self._group = group
        self._silent = {m for m in group if m in log.places}
        self._held: dict[MemberId, tuple[AnnounceKind, int, Share]] = {}
        self._sent = 0
        self._unusual = False
        self._hold_ns = max(HOLD_MIN_NS, log.median_round_us * 1000 // HOLD_SHARE)

    def hear(self, at_ns: int, announce: Announce) -> None:
        kind, share = announce.kind, announce.share
        active = share.member in self._log.places
        self._unusual |= not active or not is_usual(self._log, kind, share)
        self._held[share.member] = kind, at_ns, share
        if kind is not AnnounceKind.PENDING:
            self._silent.discard(share.member)

    def due_ns(self) -> int | None:
        """When what is held back goes on; None if nothing is."""
        if not self._held:
            return None
        enough = len(self._held) >= max(1, self._sent)
        if enough or self._unusual or not self._silent:
            return 0
        return min(at_ns for _, at_ns, _ in self._held.values()) + self._hold_ns

    def take(self, now_ns: int) -> Gathered:
        """All of it, in one message."""
        log, usual, words, figures = self._log, {}, [], Arrivals(self._log, 0)
        for member, (kind, at_ns, share) in self._held.items():
            age_us = (now_ns - at_ns) // 1000
            if member in log.places and is_usual(log, kind, share):
                usual[member] = kind, age_us
                figures.add_metrics(share.metrics)
            else:
                words.append(Word(kind, share, age_us))
        ordinary, quiet, ages = pack_usual(self._group, usual)
        self._sent += len(self._held)
        self._held, self._unusual = {}, False
        return Gathered(
            log.id,
            log.version,
            self._number,
            ordinary,
            quiet,
            ages,
            figures.metrics,
            tuple(words),
        )


def hear_all(arrivals: Arrivals, message: Gathered, group: Sequence[MemberId], at_ns: int) -> None:
    """The starter hears of a group; `at_ns`: when the message came."""
    ordinary, quiet = chosen(message.ordinary, group), chosen(message.quiet, group)
    came_ns = [at_ns - age_us * 1000 for age_us in unpack_offsets(message.ages)]
    arrivals.hear_ordinary(ordinary, came_ns[: len(ordinary)])
    for member, when_ns in zip(quiet, came_ns[len(ordinary) :], strict=True):
        arrivals.hear_usual(AnnounceKind.IDLE, when_ns, member)
    arrivals.add_metrics(message.metrics)
    for word in message.words:
        arrivals.hear(word.kind, at_ns - word.age_us * 1000, word.share)
