"""Announcements that the head of a group has received and not forwarded yet (R41).

The starter counts: it needs a number of fresh ranks, or all. While a group is far from its part of
that number, its announcements decide nothing, and wait to be sent together. The closer the group
comes to its part, the shorter they wait. An announcement that completes the part or the group is
forwarded at once, and so is one of a rank that the round waits for by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline_api.ids import MemberId
from paceline_api.types.enums import MaxAgePolicy, Mode

from paceline.core.messages import Announce, Gathered, Word
from paceline.core.protocol.arrivals import Arrivals, bench_after_ns
from paceline.core.protocol.bits import chosen, unpack_offsets
from paceline.core.protocol.composition import is_usual, pack_usual
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import (
    AnnounceKind,
    LoggedMetric,
    Operation,
    Share,
    summed,
)
from paceline.core.protocol.trigger import initiator
from paceline.core.protocol.waits import patience_ns

BENCH_SHARE: Final = 32
"""Divisor of the bench timeout, which gives the longest wait where all ranks are needed. An
incomplete group matters only for benching there (R13)."""
LEAST: Final = 4
"""Divisor of the longest wait, which gives the shortest one, so that arrivals in quick succession
make one message."""


class Collector:
    """Announcements of one group for round `log.version`, kept by the group's head."""

    def __init__(self, log: Log, number: int, group: Sequence[MemberId]) -> None:
        """Begin without announcements.

        Args:
            log: Log of the head. It must not change while this object is in use.
            number: Number of the group in the grid.
            group: Members of the group, in rank order.
        """
        self._log = log
        self._number = number
        self._group = group
        self._silent = {m for m in group if m in log.places}
        self._uncome = set(self._silent)
        """Active ranks of the group that have not even announced COMING."""
        self._all_come = self._decides = False
        """True if the held announcements complete those of the group: each active rank of it has
        announced COMING or more. `_decides` is True if one of them is more than COMING."""
        self._held: dict[MemberId, tuple[AnnounceKind, int, Share, bool]] = {}
        """Latest announcement of each rank, and whether the log predicts its share."""
        self._since_ns = 0
        """Time at which the first of the held announcements arrived."""
        self._fresh = self._fresh_sent = 0
        self._urgent = False
        self._everybody = log.quorum == len(log.active)
        version, bases = log.version, log.heard
        near = {m for m in log.active if bases.get(m, version) >= log.fresh_from}
        self._near = near & self._silent
        """Ranks of the group that began their step with the others and have not announced more than
        PENDING."""
        part = -(-log.quorum * len(self._near) // max(1, len(near)))
        self._part = max(1, min(part, len(self._silent)))
        """Part of this group in the fresh ranks that the round needs."""
        self._patience_ns = (
            bench_after_ns(log) // BENCH_SHARE
            if self._everybody
            else patience_ns(log.median_round_us, log.offsets_us)
        )

    def hear(self, at_ns: int, announce: Announce) -> None:
        """Record an announcement of a rank of the group.

        Args:
            at_ns: Time at which it arrived.
            announce: The announcement.
        """
        kind, share = announce.kind, announce.share
        member = share.member
        usual = member in self._log.places and is_usual(self._log, kind, share)
        if not self._held:
            self._since_ns = at_ns
        self._held[member] = kind, at_ns, share, usual
        self._decides |= kind is not AnnounceKind.COMING
        if kind is AnnounceKind.PENDING:
            if share.base >= self._log.fresh_from and member in self._silent:
                self._near.add(member)
            self._urgent |= member in self._log.owing
            return
        if member in self._uncome:
            self._uncome.discard(member)
            self._all_come = not self._uncome
        if kind is AnnounceKind.COMING:
            return
        self._silent.discard(member)
        self._near.discard(member)
        self._fresh += kind is AnnounceKind.ARRIVE
        self._urgent |= self._is_awaited(member)

    def _is_awaited(self, member: MemberId) -> bool:
        """Return True if the round waits for this rank: it was drawn, or would be too old."""
        log, s = self._log, self._log.settings
        if member in log.owing:
            return True
        if s.late is MaxAgePolicy.WAIT and s.max_age:
            return log.age(log.heard.get(member, log.version)) >= s.max_age
        return s.mode is Mode.MAJORITY and s.random_initiator and member == initiator(log)

    def due_ns(self) -> int | None:
        """Return when the held announcements have to be forwarded.

        Returns:
            The time, which is 0 for at once; None if nothing is held, or if it is not worth a
            message.
        """
        if not self._held:
            return None
        if self._urgent or self._all_come or not self._silent:
            return 0
        if not self._decides:
            return None  # a streamed round needs all ranks (R34)
        if self._everybody:
            return self._since_ns + self._patience_ns
        if self._fresh >= self._part > self._fresh_sent or not self._near:
            return 0
        left = max(0, self._part - self._fresh)
        share = self._patience_ns * left // self._part
        return self._since_ns + max(share, self._patience_ns // LEAST)

    def take(self, now_ns: int) -> Gathered:
        """Take out all held announcements, to be sent in one message.

        Args:
            now_ns: Present time, from which the ages of the announcements are counted.

        Returns:
            The message for the starter.
        """
        usual: dict[MemberId, tuple[AnnounceKind, int]] = {}
        coming: dict[MemberId, tuple[AnnounceKind, int]] = {}
        words: list[Word] = []
        figures: list[LoggedMetric] = []
        first: Share | None = None
        """Share of the first ordinary rank that waits in an operation."""
        coming_operation: Operation | None = None
        """Operation of the last rank that is forwarded with the share of its COMING."""
        for member, (kind, at_ns, share, as_usual) in self._held.items():
            age_us = (now_ns - at_ns) // 1000
            if as_usual and kind is AnnounceKind.COMING and share.operation == coming_operation:
                coming[member] = AnnounceKind.ARRIVE, age_us
            elif kind is AnnounceKind.COMING:
                coming_operation = share.operation
                words.append(Word(kind, share, age_us))
            elif as_usual and first is not None and share.operation != first.operation:
                words.append(Word(kind, share, age_us))
            elif as_usual:
                first = first or (share if share.operation is not None else None)
                usual[member] = kind, age_us
                figures += share.metrics
            else:
                words.append(Word(kind, share, age_us))
        ordinary, quiet, ages = pack_usual(self._group, usual)
        coming_bits, _, coming_ages = pack_usual(self._group, coming)
        self._fresh_sent = self._fresh
        self._held = {}
        self._urgent = self._all_come = self._decides = False
        return Gathered(
            self._log.id,
            self._log.version,
            self._number,
            ordinary,
            quiet,
            ages,
            coming_bits,
            coming_ages,
            summed(figures),
            tuple(words),
            first,
        )


def hear_all(arrivals: Arrivals, message: Gathered, group: Sequence[MemberId], at_ns: int) -> None:
    """Record the announcements of a group at the starter.

    Args:
        arrivals: Announcements for the round.
        message: Message of the group's head.
        group: Members of the group, in rank order.
        at_ns: Time at which the message arrived.
    """
    ordinary, quiet = chosen(message.ordinary, group), chosen(message.quiet, group)
    came_ns = [at_ns - age_us * 1000 for age_us in unpack_offsets(message.ages)]
    arrivals.hear_ordinary(ordinary, came_ns[: len(ordinary)])
    for member, when_ns in zip(quiet, came_ns[len(ordinary) :], strict=True):
        arrivals.hear_usual(AnnounceKind.IDLE, when_ns, member)
    coming_ns = (at_ns - age_us * 1000 for age_us in unpack_offsets(message.coming_ages))
    for member, when_ns in zip(chosen(message.coming, group), coming_ns, strict=True):
        arrivals.hear_usual(AnnounceKind.COMING, when_ns, member)
    arrivals.add_metrics(message.metrics)
    if message.operation is not None:
        arrivals.compare(message.operation)
    for word in message.words:
        arrivals.hear(word.kind, at_ns - word.age_us * 1000, word.share)
