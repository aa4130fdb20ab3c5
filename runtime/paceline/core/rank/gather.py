"""What the head of a group has heard for a round and not passed on yet (R41).

The starter counts: so many fresh ranks, or all. As long as a group is far from its part of that,
its words decide nothing and wait for each other; the closer it comes, the less they wait. What
completes the part, or the group, goes on at once, and so does a rank that the round waits for by
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline_api.types.enums import MaxAgePolicy, Mode

from paceline.core.messages import Announce, Gathered, Word
from paceline.core.protocol.arrivals import Arrivals, bench_after_ns
from paceline.core.protocol.bits import chosen, unpack_offsets
from paceline.core.protocol.composition import is_usual, pack_usual
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, LoggedMetric, Share, summed
from paceline.core.protocol.trigger import initiator
from paceline.core.protocol.waits import patience_ns

BENCH_SHARE: Final = 32
"""Where everybody is needed, an incomplete group matters to R13 alone: this part of its wait."""
LEAST: Final = 4
"""The wait never falls below this part of the patience: arrivals in a row make one message."""


class Collector:
    """Of one head, for round `log.version`."""

    def __init__(self, log: Log, number: int, group: Sequence[MemberId]) -> None:
        self._log = log
        self._number = number
        self._group = group
        self._silent = {m for m in group if m in log.places}
        self._uncome = set(self._silent)
        """Those that have not even said COMING."""
        self._all_come = self._decides = False
        """What is held completes COMING; it has more than COMING."""
        self._held: dict[MemberId, tuple[AnnounceKind, int, Share, bool]] = {}
        """Last words, and whether they are usual."""
        self._since_ns = 0
        """When the first of them came."""
        self._fresh = self._fresh_sent = 0
        self._urgent = False
        self._everybody = log.quorum == len(log.active)
        version, heard = log.version, log.heard
        near = {m for m in log.active if heard.get(m, version) >= log.fresh_from}
        self._near = near & self._silent
        """Those of the group that began their step with the others, and are awaited."""
        part = -(-log.quorum * len(self._near) // max(1, len(near)))
        self._part = max(1, min(part, len(self._silent)))
        """Of the fresh ranks that the round needs."""
        self._patience_ns = (
            bench_after_ns(log) // BENCH_SHARE
            if self._everybody
            else patience_ns(log.median_round_us, log.offsets_us)
        )

    def hear(self, at_ns: int, announce: Announce) -> None:
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
        """By name: it would become too old, or was drawn."""
        log, s = self._log, self._log.settings
        if s.late is MaxAgePolicy.WAIT and s.max_age:
            return log.age(log.heard.get(member, log.version)) >= s.max_age
        return s.mode is Mode.MAJORITY and s.random_initiator and member == initiator(log)

    def due_ns(self) -> int | None:
        """When what is held back goes on; None if nothing is."""
        if not self._held:
            return None
        if self._urgent or self._all_come or not self._silent:
            return 0
        if not self._decides:
            return None  # a streamed round needs everybody (R34)
        if self._everybody:
            return self._since_ns + self._patience_ns
        if self._fresh >= self._part > self._fresh_sent or not self._near:
            return 0
        left = max(0, self._part - self._fresh)
        share = self._patience_ns * left // self._part
        return self._since_ns + max(share, self._patience_ns // LEAST)

    def take(self, now_ns: int) -> Gathered:
        """All of it, in one message."""
        usual: dict[MemberId, tuple[AnnounceKind, int]] = {}
        coming: dict[MemberId, tuple[AnnounceKind, int]] = {}
        words: list[Word] = []
        figures: list[LoggedMetric] = []
        for member, (kind, at_ns, share, is_told) in self._held.items():
            age_us = (now_ns - at_ns) // 1000
            if is_told and kind is AnnounceKind.COMING:
                coming[member] = AnnounceKind.ARRIVE, age_us
            elif is_told:
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
        )


def hear_all(arrivals: Arrivals, message: Gathered, group: Sequence[MemberId], at_ns: int) -> None:
    """The starter hears of a group; `at_ns`: when the message came."""
    ordinary, quiet = chosen(message.ordinary, group), chosen(message.quiet, group)
    came_ns = [at_ns - age_us * 1000 for age_us in unpack_offsets(message.ages)]
    arrivals.hear_ordinary(ordinary, came_ns[: len(ordinary)])
    for member, when_ns in zip(quiet, came_ns[len(ordinary) :], strict=True):
        arrivals.hear_usual(AnnounceKind.IDLE, when_ns, member)
    coming_ns = (at_ns - age_us * 1000 for age_us in unpack_offsets(message.coming_ages))
    for member, when_ns in zip(chosen(message.coming, group), coming_ns, strict=True):
        arrivals.hear_usual(AnnounceKind.COMING, when_ns, member)
    arrivals.add_metrics(message.metrics)
    for word in message.words:
        arrivals.hear(word.kind, at_ns - word.age_us * 1000, word.share)
