"""Bookkeeping of the announcements that the starter of a round has received.

The trigger table (`core.protocol.trigger`) asks after each announcement whether the round starts.
It needs counts, the time of the k-th arrival, and the single ranks for which the round waits. They
are kept up to date here, so that one more announcement costs the same whether ten ranks have
announced before it or ten thousand. The lists of contributing and of silent ranks are made once,
when the round starts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final, NamedTuple

from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import MaxAgePolicy, Mode

from paceline.core.protocol.composition import is_usual
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, LoggedMetric, Operation, Share
from paceline.core.protocol.waits import deadline_ns, grace_ns

BENCH_AFTER_MIN_NS: Final = 60 * NS_PER_S
"""Lower bound on the automatic bench timeout (`bench_after_ns`): 60 s."""
BENCH_AFTER_ROUNDS: Final = 20
"""Automatic bench timeout, as a number of median rounds."""


class Arrival(NamedTuple):
    """Latest announcement of one rank for the current round."""

    kind: AnnounceKind
    at_ns: int
    """Time at which it reached the starter or, in a large job, the head of its group."""
    share: Share | None
    """Announced share; None if it is the one that the log predicts (`core.protocol.composition`).
    """


class Arrivals:
    """Announcements for round `log.version`, READY of passive ranks included."""

    def __init__(self, log: Log, opened_ns: int) -> None:
        """Begin without announcements.

        Args:
            log: Log of the starter. It must not change while this object is in use.
            opened_ns: Time at which the round began at the starter: when it committed the previous
                round, or when its generation started.
        """
        self.log: Final = log
        self.opened_ns: Final = opened_ns
        self.latest_ns = opened_ns
        """Time of the latest announcement of an active rank, COMING excluded."""
        self.last: dict[MemberId, Arrival] = {}
        """Latest announcement of each rank, COMING excluded."""
        self.fresh: list[int] = []
        """Arrival times of the fresh contributions, in ascending order."""
        self.idle = 0
        """Number of active ranks that announced IDLE."""
        self.here = 0
        """Number of active ranks that the round no longer waits for: they announced more than
        PENDING."""
        self.done = 0
        """Number of active ranks whose announcement reports that their loop has ended."""
        self.coming: dict[MemberId, Arrival] = {}
        """Active ranks whose latest announcement is COMING. They count as silent, except in a
        streamed round (R34)."""
        self.ready: set[MemberId] = set()
        """Passive ranks that announced READY, so that GO may make them active."""
        self.operation: Operation | None = None
        """Operation that the first rank waits in; None in a job that steps the optimizer."""
        self.coming_operation: Operation | None = None
        """Operation of the first rank that announced COMING. It may still make another one before,
        such as a call inside of backward()."""
        self.differs: tuple[Share, Share] | None = None
        """Shares of two ranks that wait in different operations; None if there are none."""
        self._first: Share | None = None
        self._coming_differs = False
        """True if two ranks have announced COMING with different operations."""
        self._metrics: dict[str, tuple[float, float]] = {}
        self._notable = 0
        """Number of active ranks with something to apply or to record."""
        # The requirements of the mode do not change within a round.
        s = log.settings
        self.quorum: Final = log.quorum
        self.partial: Final = not log.is_full_round
        by_deadline = self.partial and s.mode is Mode.DEADLINE
        self.deadline_ns: Final = deadline_ns(s, log.offsets_us) if by_deadline else 0
        self.grace_ns: Final = grace_ns(s, log.median_round_us)
        self.bench_after_ns: Final = bench_after_ns(log)
        self._near = self._began_with_the_others()
        self._overdue = self._too_old_to_leave()

    # ---- receiving announcements ---------------------------------------------------------

    def hear(self, kind: AnnounceKind, at_ns: int, share: Share) -> None:
        """Record one announcement.

        Args:
            kind: Kind of the announcement.
            at_ns: Time at which it arrived.
            share: What the rank announced.
        """
        if kind is AnnounceKind.COMING:
            self._compare_coming(share.operation)
        elif share.operation is not None:
            self.compare(share)
        if share.member in self.log.places and is_usual(self.log, kind, share):
            self.hear_usual(kind, at_ns, share.member)
            self.add_metrics(share.metrics)
        else:
            self._hear(share.member, Arrival(kind, at_ns, share))

    def compare(self, share: Share) -> None:
        """Note the operation that a rank waits in, and whether it is that of the others (S3).

        Args:
            share: What the rank announced, with its operation.
        """
        if self._first is None:
            self._first, self.operation = share, share.operation
        elif self.operation is None or not self.operation.is_as(share.operation):
            self.differs = self.differs or (self._first, share)
        elif share.operation is not None and share.operation.settles:
            self.operation = share.operation

    def _compare_coming(self, operation: Operation | None) -> None:
        if self.coming_operation is None:
            self.coming_operation = operation
        elif operation != self.coming_operation:
            self._coming_differs = True

    def hear_usual(self, kind: AnnounceKind, at_ns: int, member: MemberId) -> None:
        """Record ARRIVE or COMING of an ordinary rank or IDLE of a quiet one, without metrics."""
        self._hear(member, Arrival(kind, at_ns, None))

    def hear_ordinary(self, members: Sequence[MemberId], at_ns: Sequence[int]) -> None:
        """Record ARRIVE of many ordinary ranks at once.

        Args:
            members: Ranks that arrived, each at most once.
            at_ns: Arrival time of each of them.
        """
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
        """Add user metrics of ordinary ranks to the sums that GO carries."""
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
                return  # a later announcement of this rank has overtaken this one
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
        news = share.count or share.drops or share.returned or share.stop or share.metrics
        if news or share.resting is not resting:
            self._notable += by

    # ---- queries of the trigger table ----------------------------------------------------

    @property
    def missing(self) -> int:
        """Number of active ranks for which the round may still wait."""
        return len(self.log.active) - self.here

    @property
    def awaited(self) -> int:
        """Number of missing ranks that the round has to wait for in any mode.

        A rank of a script that was admitted gets its state at an operation where scripts can begin.
        Until then the others go on without it (S9).
        """
        operation, lacking = self.operation, len(self.log.active) - len(self.log.with_state)
        if operation is None or operation.opens or not 0 < self.missing <= lacking:
            return self.missing
        has_state = set(self.log.with_state)
        return sum(member in has_state for member in self.silent())

    @property
    def all_coming(self) -> bool:
        """Return True if at least one rank is missing and all missing ranks have announced COMING.

        In a script they must have announced the operation in which the others wait.
        """
        if not self.coming or len(self.coming) != self.missing or self._coming_differs:
            return False
        return self.operation in (None, self.coming_operation)

    @property
    def spread_ns(self) -> int:
        """Time from the announcement that met the quorum to the last announcement (R34).

        COMING counts as ARRIVE. Fewer arrivals than the quorum count as if the last one had met it.
        """
        comers = sorted([*self.fresh, *(a.at_ns for a in self.coming.values())])
        enough_ns = comers[min(self.quorum, len(comers)) - 1]
        return max(comers[-1], self.latest_ns) - enough_ns

    def named(self, *, streamed: bool) -> dict[MemberId, Arrival]:
        """Return the announcement of each active rank that GO would name.

        Args:
            streamed: True to include the ranks that announced COMING, as if they had arrived.

        Returns:
            Latest announcement of each of these ranks.
        """
        named = {m: self.last[m] for m in self.log.active if m in self.last}
        if streamed:
            coming = self.coming.items()
            named |= {m: a._replace(kind=AnnounceKind.ARRIVE) for m, a in coming}
        return named

    def has_ended(self, member: MemberId) -> bool:
        """Return True if the last announcement of an active rank says that its loop has ended."""
        latest = self.last.get(member)
        if latest is None or latest.share is None:
            return latest is not None and member in self.log.done
        return latest.share.done

    def silent(self) -> tuple[MemberId, ...]:
        """Return the active ranks for which the round still waits, in rank order."""
        latest = self.last
        return tuple(
            m for m in self.log.active if m not in latest or latest[m].kind is AnnounceKind.PENDING
        )

    @property
    def metrics(self) -> tuple[LoggedMetric, ...]:
        """User metrics of the ordinary ranks, summed, in the order of their names."""
        return tuple(LoggedMetric(name, *pair) for name, pair in sorted(self._metrics.items()))

    @property
    def something(self) -> bool:
        """Return True if there is something to apply, to admit or to record."""
        if self._notable or self.ready:
            return True
        # If all loops have ended, this round ends the job.
        ended = not self.log.plan.ends and self.done == len(self.log.active)
        return ended and self.log.may_end_with(self.last)

    @property
    def anybody_near(self) -> bool:
        """Return True if a silent rank began its step together with the others.

        Grace is only for such ranks. A slower rank is still at an older version, or it finished its
        last step in the middle of this round and has only just begun the next one.
        """
        return bool(self._near)

    @property
    def overdue(self) -> MemberId | None:
        """Silent rank whose work would be too old after this round.

        Under `MaxAgePolicy.WAIT` that is one whose batch is. In a script it is one that has not
        taken the average of the last step (S17.3), which it shows by any announcement.
        """
        while self._overdue:
            member = self._overdue[-1]
            latest = self.last.get(member)
            pending = latest is not None and latest.kind is AnnounceKind.PENDING
            if latest is None or (pending and not self.log.plan.script):
                return member
            self._overdue.pop()
        return None

    def _began_with_the_others(self) -> set[MemberId]:
        log = self.log
        if not self.grace_ns:
            return set()  # without grace, `anybody_near` does not matter
        version, bases = log.version, log.heard
        return {m for m in log.active if bases.get(m, version) >= log.fresh_from}

    def _look_whether_near(self, member: MemberId, arrival: Arrival) -> None:
        """Count a rank as near if its PENDING shows that it began its step with the others."""
        began_by_ns = self.opened_ns + self.grace_ns
        if (
            arrival.kind is AnnounceKind.PENDING
            and arrival.share is not None
            and arrival.share.base >= self.log.fresh_from
            and arrival.at_ns <= began_by_ns
        ):
            self._near.add(member)
        else:
            self._near.discard(member)

    def _too_old_to_leave(self) -> list[MemberId]:
        """Return the ranks that may be `overdue`, in reverse order, as a stack."""
        log, s = self.log, self.log.settings
        if log.plan.script:
            return sorted(log.owing, reverse=True)
        if s.late is not MaxAgePolicy.WAIT or not s.max_age:
            return []
        version, bases = log.version, log.heard
        return [m for m in reversed(log.active) if log.age(bases.get(m, version)) >= s.max_age]


def bench_after_ns(log: Log) -> int:
    """Return for how long a rank may stay silent before it is benched, in nanoseconds (R13)."""
    if log.settings.bench_after_ns:
        return log.settings.bench_after_ns
    return max(BENCH_AFTER_MIN_NS, BENCH_AFTER_ROUNDS * log.median_round_us * 1000)
