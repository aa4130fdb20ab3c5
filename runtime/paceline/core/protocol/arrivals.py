"""What the starter of a round has heard, kept so that one more announcement costs the same whether
ten ranks have announced before it or ten thousand.

The trigger table (`core.protocol.trigger`) asks after each announcement whether the round starts.
Its questions are about counts, the k-th arrival and single ranks that hold the round, so these are
kept up to date here; whoever is named or left behind is looked up once, when the round starts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final, NamedTuple

from paceline_api.types.enums import MaxAgePolicy, Mode

from paceline.core.protocol.composition import is_usual
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, LoggedMetric, Share
from paceline.core.protocol.waits import deadline_ns, grace_ns

BENCH_AFTER_MIN_NS: Final = 60 * 10**9
BENCH_AFTER_ROUNDS: Final = 20


class Arrival(NamedTuple):
    """The last announcement of one rank for the round in question."""

    kind: AnnounceKind
    at_ns: int
    share: Share | None
    """None: the log tells it, as `core.protocol.composition` says."""


class Arrivals:
    """The announcements for round `log.version`, READY of passive ranks included."""

    def __init__(self, log: Log, opened_ns: int) -> None:
        """`opened_ns`: when the starter committed the round before."""
        self.log: Final = log
        self.opened_ns: Final = opened_ns
        self.latest_ns = opened_ns
        """Of the announcements of active ranks."""
        self.last: dict[MemberId, Arrival] = {}
        """What counts of each rank."""
        self.fresh: list[int] = []
        """When the fresh ones arrived, in order."""
        self.idle = 0
        self.here = 0
        """Active ranks that are waited for no more: they have said more than PENDING."""
        self.done = 0
        """Active ranks whose loops have ended."""
        self.coming: dict[MemberId, Arrival] = {}
        """Active ranks that have said COMING and nothing since: silent, but for a streamed round
        (R34)."""
        self.ready: set[MemberId] = set()
        """Passive ranks that may be made active."""
        self._metrics: dict[str, tuple[float, float]] = {}
        self._notable = 0
        """Active ranks with something to apply or to record."""
        # What the mode asks for does not change within a round.
        s = log.settings
        self.quorum: Final = log.quorum
        self.partial: Final = not log.is_full_round
        by_deadline = self.partial and s.mode is Mode.DEADLINE
        self.deadline_ns: Final = deadline_ns(s, log.offsets_us) if by_deadline else 0
        self.grace_ns: Final = grace_ns(s, log.median_round_us)
        self.bench_after_ns: Final = bench_after_ns(log)
        self._near = self._began_with_the_others()
        self._overdue = self._too_old_to_leave()

    # ---- hearing --------------------------------------------------------------------------

    def hear(self, kind: AnnounceKind, at_ns: int, share: Share) -> None:
        if share.member in self.log.places and is_usual(self.log, kind, share):
            self.hear_usual(kind, at_ns, share.member)
            self.add_metrics(share.metrics)
        else:
            self._hear(share.member, Arrival(kind, at_ns, share))

    def hear_usual(self, kind: AnnounceKind, at_ns: int, member: MemberId) -> None:
        """ARRIVE or COMING of an ordinary rank, or IDLE of a quiet one; its figures come apart."""
        self._hear(member, Arrival(kind, at_ns, None))

    def hear_ordinary(self, members: Sequence[MemberId], at_ns: Sequence[int]) -> None:
        """ARRIVE of many at once; at most one of each rank."""
        last, places, fresh, new = self.last, self.log.places, self.fresh, 0
        for member, when_ns in zip(members, at_ns, strict=True):
            if member in last or member not in places or member in self.coming:
                self.hear_usual(AnnounceKind.ARRIVE, when_ns, member)
            else:
                last[member] = Arrival(AnnounceKind.ARRIVE, when_ns, None)
                insort(fresh, when_ns)
                new += 1
        if new:
            self.here += new
            self._notable += new
            self.latest_ns = max(self.latest_ns, *at_ns)
            self._near.difference_update(members)

    def add_metrics(self, metrics: tuple[LoggedMetric, ...]) -> None:
        for metric in metrics:
            total, weight = self._metrics.get(metric.name, (0.0, 0.0))
            self._metrics[metric.name] = total + metric.total, weight + metric.weight

    def _hear(self, member: MemberId, new: Arrival) -> None:
        old = self.last.get(member)
        if new.kind is AnnounceKind.COMING:
            if member in self.log.places and (old is None or old.kind is AnnounceKind.PENDING):
                self.coming[member] = new
            return
        self.coming.pop(member, None)
        if old is not None:
            if new.kind is AnnounceKind.PENDING and old.kind is not AnnounceKind.PENDING:
                return  # overtaken on its way by what the rank said after it
            new = new._replace(at_ns=max(new.at_ns, old.at_ns))
        self.last[member] = new
        if member in self.log.places:
            if old is not None:
                self._count(member, old, -1)
            self._count(member, new, 1)
            self.latest_ns = max(self.latest_ns, new.at_ns)
            self._look_whether_near(member, new)
        elif new.kind is AnnounceKind.READY:
            self.ready.add(member)

    def _count(self, member: MemberId, arrival: Arrival, by: int) -> None:
        kind, at_ns, share = arrival
        if kind is AnnounceKind.ARRIVE:
            if by > 0:
                insort(self.fresh, at_ns)
            else:
                del self.fresh[bisect_left(self.fresh, at_ns)]
        elif kind is AnnounceKind.IDLE:
            self.idle += by
        if kind is not AnnounceKind.PENDING:
            self.here += by
        if share is None:
            ordinary = kind is AnnounceKind.ARRIVE
            self._notable += by * ordinary
            self.done += by * (not ordinary and member in self.log.done)
            return
        self.done += by * share.done
        resting = member in self.log.resting
        said = share.count or share.drops or share.returned or share.stop or share.metrics
        if said or share.resting is not resting:
            self._notable += by

    # ---- what the table asks --------------------------------------------------------------

    @property
    def missing(self) -> int:
        """Active ranks that the round might wait for."""
        return len(self.log.active) - self.here

    @property
    def all_coming(self) -> bool:
        """Nobody is missing but those who have said COMING."""
        return bool(self.coming) and len(self.coming) == self.missing

    @property
    def spread_ns(self) -> int:
        """From the announcement with which a round would have enough, COMING counted as if it were
        ARRIVE, to the last one (R34)."""
        comers = sorted([*self.fresh, *(a.at_ns for a in self.coming.values())])
        enough_ns = comers[min(self.quorum, len(comers)) - 1]
        return max(comers[-1], self.latest_ns) - enough_ns

    def named(self, *, streamed: bool) -> dict[MemberId, Arrival]:
        """What a GO would name of each active rank; of one that is coming only if it is streamed:
        its batch, as if it had arrived."""
        said = {m: self.last[m] for m in self.log.active if m in self.last}
        if streamed:
            coming = self.coming.items()
            said |= {m: a._replace(kind=AnnounceKind.ARRIVE) for m, a in coming}
        return said

    def silent(self) -> tuple[MemberId, ...]:
        """Their names."""
        said = self.last
        return tuple(
            m for m in self.log.active if m not in said or said[m].kind is AnnounceKind.PENDING
        )

    @property
    def metrics(self) -> tuple[LoggedMetric, ...]:
        """User's figures of the ordinary ranks, summed."""
        return tuple(LoggedMetric(name, *pair) for name, pair in sorted(self._metrics.items()))

    @property
    def something(self) -> bool:
        """There is something to apply, to admit or to record."""
        if self._notable or self.ready:
            return True
        # The round that ends the job.
        return not self.log.plan.ends and self.done == len(self.log.active)

    @property
    def anybody_near(self) -> bool:
        """A silent rank began its step with the others: grace is not for a slower one, which is
        still at an older version, or came in the middle of this round and has just begun."""
        return bool(self._near)

    @property
    def overdue(self) -> MemberId | None:
        """Under MaxAgePolicy.WAIT: a silent rank whose work would be too old if left again."""
        while self._overdue:
            member = self._overdue[-1]
            said = self.last.get(member)
            if said is None or said.kind is AnnounceKind.PENDING:
                return member
            self._overdue.pop()
        return None

    def _began_with_the_others(self) -> set[MemberId]:
        log = self.log
        if not self.grace_ns:
            return set()  # nobody is ever asked
        version, heard = log.version, log.heard
        return {m for m in log.active if heard.get(m, version) >= log.fresh_from}

    def _look_whether_near(self, member: MemberId, said: Arrival) -> None:
        began_by_ns = self.opened_ns + self.grace_ns
        if (
            said.kind is AnnounceKind.PENDING
            and said.share is not None
            and said.share.base >= self.log.fresh_from
            and said.at_ns <= began_by_ns
        ):
            self._near.add(member)
        else:
            self._near.discard(member)

    def _too_old_to_leave(self) -> list[MemberId]:
        """The first one last, so that it can be taken off."""
        log, s = self.log, self.log.settings
        if s.late is not MaxAgePolicy.WAIT or not s.max_age:
            return []
        version, heard = log.version, log.heard
        return [m for m in reversed(log.active) if log.age(heard.get(m, version)) >= s.max_age]


def bench_after_ns(log: Log) -> int:
    if log.settings.bench_after_ns:
        return log.settings.bench_after_ns
    return max(BENCH_AFTER_MIN_NS, BENCH_AFTER_ROUNDS * log.median_round_us * 1000)
