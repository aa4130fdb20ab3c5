"""Metrics of how often the membership changes and what a change costs, as one rank observes it.

A change has four phases (docs/design/metrics.md), and each ends with an event: this rank is asked
for a promise, COMMIT arrives, the data channel is connected, the first round is committed. The
times are taken from the rank's state after each event, so that no rule of the protocol has to know
of them.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_S

from paceline.core.protocol.records import Gen, Go
from paceline.core.rank.state import RankState
from paceline.telemetry.records import RankRecord

PHASES: Final = ("detect", "prepare", "wire", "resume")
"""The four phases of a change, as metric labels."""


class MembershipMetrics:
    """Metrics of generations and members. Communication thread only."""

    def __init__(self, record: RankRecord) -> None:
        self._generation = record.gauge("paceline_generation_number")
        self._incarnation = record.gauge("paceline_incarnation_number")
        self._index = record.gauge("paceline_rank_index")
        self._rounds = record.gauge("paceline_committed_rounds")
        self._members = record.gauge("paceline_world_size_ranks", ranks="members")
        self._active = record.gauge("paceline_world_size_ranks", ranks="active")
        self._generations = record.counter("paceline_generations_total")
        self._joined = record.counter("paceline_joined_total")
        self._left = cache(lambda why: record.counter("paceline_left_total", why=why))
        self._redealt = record.counter("paceline_samples_redealt_total")
        self._redealt_seen = 0
        self._benched = record.counter("paceline_benched_total")
        self._resize_s = record.histogram("paceline_resize_duration_seconds")
        self._phase_s = [
            record.counter("paceline_resize_phase_seconds_total", phase=phase) for phase in PHASES
        ]
        self._gen: Gen | None = None
        self._before: frozenset[MemberId] = frozenset()
        """Members of the previous generation."""
        self._promise: object = None
        self._started = False
        self._applied_ns = 0
        """Time of the last round; 0 = none yet."""
        self._times_ns: list[int] = []
        """Times of the change in progress, as far as it has come: last round, promise, COMMIT,
        started."""

    def follow(self, rank: RankState, now_ns: int) -> bool:
        """Note how far a change has come. Called after each event.

        Args:
            rank: State of this rank.
            now_ns: The present time.

        Returns:
            True if a new generation has begun for this rank.
        """
        if rank.promise is not self._promise:
            self._promise = rank.promise
            if not self._times_ns and self._applied_ns:
                self._times_ns = [self._applied_ns, now_ns]
        if rank.started is not self._started:
            self._started = rank.started
            if rank.started and len(self._times_ns) == 3:
                self._times_ns.append(now_ns)
        gen = rank.log.gen
        if gen is self._gen or gen is None:
            return False
        self._gen = gen
        self._count(gen, rank)
        # A later change may overtake this one: both count as one, and the last COMMIT counts.
        if len(self._times_ns) >= 2:
            self._times_ns[2:] = [now_ns, now_ns] if rank.started else [now_ns]
        return True

    def applied(self, go: Go, rank: RankState, now_ns: int) -> None:
        """Note that a round is committed, which ends a change in progress."""
        if len(self._times_ns) == 4:
            self._resize_s.observe((now_ns - self._times_ns[0]) / NS_PER_S)
            ends = (*self._times_ns[1:], now_ns)
            for counter, begin, end in zip(self._phase_s, self._times_ns, ends, strict=True):
                counter.add((end - begin) / NS_PER_S)
            self._times_ns = []
        self._applied_ns = now_ns
        self._rounds.set(rank.log.version)
        if go.admitted or go.benched:
            self._active.set(len(rank.log.active))
            self._count_redealt(rank)
            if any(b.member == rank.me for b in go.benched):
                self._benched.add()

    def _count_redealt(self, rank: RankState) -> None:
        redealt = rank.log.ledger.total().redealt
        self._redealt.add(max(0, redealt - self._redealt_seen))
        self._redealt_seen = redealt

    def _count(self, gen: Gen, rank: RankState) -> None:
        members = frozenset(gen.members)
        self._generations.add()
        if self._before:
            self._joined.add(len(members - self._before))
        for left in gen.left_out:
            self._left(left.why).add()
        self._before = members
        self._count_redealt(rank)
        self._generation.set(gen.id.counter)
        self._incarnation.set(gen.id.incarnation)
        self._index.set(gen.members.index(rank.me))
        self._members.set(len(members))
        self._active.set(len(rank.log.active))
        self._rounds.set(rank.log.version)
