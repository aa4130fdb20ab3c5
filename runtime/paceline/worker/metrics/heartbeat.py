"""A rank's heartbeat, and its figures for `status` (`core.status.Fact`).

The communication thread calls this. The link thread calls `heartbeat` and `figures`, too, and holds
the lock of the rank's state meanwhile; these two read nothing else that is changed in place. The
log's figures are equal on all ranks, so only the lowest active rank reports them (R42). The hot
path stores a few numbers, and the facts are computed at most every REFRESH_NS.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from statistics import median
from typing import Final

from paceline_api.ids import MemberId
from paceline_api.status import LogStatus, OperationKind, ShadowStatus
from paceline_api.times import NS_PER_MS, NS_PER_S, US_PER_S

from paceline.core.log_figures import pack_log
from paceline.core.messages import Away, Doing, Heartbeat, RankFigures
from paceline.core.protocol.ledger import Ledger, since
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import Go, LoggedMetric, summed
from paceline.core.protocol.sampling import left_out_per_epoch
from paceline.core.protocol.shadow import ShadowReport
from paceline.core.rank.state import Main, RankState
from paceline.core.status import METRIC_ROUNDS, Fact
from paceline.worker.metrics.pace import JobSpeed

REFRESH_NS: Final = 150 * NS_PER_MS
"""Shortest interval between two computations of the facts, in nanoseconds."""
RECENT: Final = 32
"""Number of recent steps and arrivals of which medians are taken."""
_NO_SUMS: Final[dict[str, tuple[float, float]]] = {}
"""The script's figures where it logs none, shared by all rounds. Never changed."""


class HeartbeatFacts:
    """The facts of one rank, as far as they were computed last."""

    def __init__(self, recorded: Callable[[], dict[str, float]] = dict) -> None:
        """Create the facts of a rank that has not made a step.

        Args:
            recorded: Returns the facts that the rank's record holds (`RankRecord.facts`).
        """
        self.squares: dict[str, float] = {}
        """Figures of `worker.metrics.squares`; empty unless the run is measured for a plan."""
        self.log: LogStatus | None = None
        """What the round log said when the facts were computed last; None if another rank reports
        it."""
        self._recorded = recorded
        self._facts: dict[str, float] = {}
        """The computed facts. Replaced as a whole, so the link thread may read it at any time."""
        self._refreshed_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=RECENT)
        self._step_s = 0.0
        """Median of `_steps_ns` in seconds, when the facts were computed last."""
        self._speed = JobSpeed()
        self._lags_us: deque[int] = deque(maxlen=RECENT)
        self._resumed_ns: int | None = None
        self._parked_ns: int | None = None
        self._wait_ns = 0
        self._avoided_ns = 0
        self._contributed: dict[MemberId, int] = {}
        self._active: dict[MemberId, int] = {}
        """Number of rounds in which each rank was active. The rounds since the set of active ranks
        last changed are not in it yet, and their contributions are not in `_contributed`."""
        self._active_now: tuple[MemberId, ...] = ()
        self._active_rounds = 0
        self._ledger: Ledger | None = None
        self._counted: dict[MemberId, int] = {}
        """Number of rounds with a contribution of each rank, as the ledger held it when it was last
        read."""
        self._operations: Counter[OperationKind] = Counter()
        self._sums: deque[dict[str, tuple[float, float]]] = deque(maxlen=METRIC_ROUNDS + 1)
        """The script's figures after each recent round, and before the first of them."""

    def stepped(self, now_ns: int) -> None:
        """Note that the main thread announces a gradient and is parked."""
        if self._resumed_ns is not None:
            self._steps_ns.append(now_ns - self._resumed_ns)
        self._parked_ns = now_ns

    def resumed(self, now_ns: int) -> None:
        """Note that the main thread goes on, and add the time for which it was parked."""
        self._resumed_ns = now_ns
        if self._parked_ns is not None:
            self._wait_ns += now_ns - self._parked_ns
            self._parked_ns = None

    def avoided(self, spent_ns: int) -> None:
        """Add waiting time that a partial mode has saved, in nanoseconds."""
        self._avoided_ns += spent_ns

    def applied(self, go: Go, rank: RankState, lag_us: int | None) -> None:
        """Note that a round is committed.

        Args:
            go: The round.
            rank: State of the rank, whose log holds the round.
            lag_us: How long after the first fresh rank this one arrived, in microseconds; None if
                this rank was not fresh in the round.
        """
        if lag_us is not None:
            self._lags_us.append(lag_us)
        log = rank.log
        if go.operation is not None:
            step = OperationKind.SETTLED if log.settles else OperationKind.STEP
            self._operations[OperationKind.CALL if go.operation.is_call else step] += 1
        if log.ledger is not self._ledger:
            # The log is a donor's or a checkpoint's: its earlier counts are not of these rounds.
            self._sums.clear()
            self._sums.append(_without(log, go))
        if log.active is not self._active_now or log.ledger is not self._ledger:
            self._follow_anew(log, go)
        self._active_rounds += 1
        self._sums.append(dict(log.ledger.metrics) if log.ledger.metrics else _NO_SUMS)

    def _follow_anew(self, log: Log, go: Go) -> None:
        """Begin a new count: other ranks are active now, or the log was replaced (by a donor's)."""
        now = set(log.read(go).contributors)
        if log.ledger is self._ledger:
            self._count_shares(but_for=now)
        else:
            self._ledger, self._active_rounds = log.ledger, 0
            counted = log.ledger.by_member
            self._counted = {m: t.rounds - (m in now) for m, t in counted.items()}
        self._active_now = log.active

    def _count_shares(self, but_for: Collection[MemberId] = ()) -> None:
        """Count the rounds and contributions that the ledger has counted since the last call.

        Args:
            but_for: Contributors of the ledger's last round, which belongs to the next count.
        """
        for member in self._active_now:
            self._active[member] = self._active.get(member, 0) + self._active_rounds
        self._active_rounds = 0
        if self._ledger is None:
            return
        counted: dict[MemberId, int] = {}
        for member, totals in self._ledger.by_member.items():
            counted[member] = totals.rounds - (member in but_for)
            # The counts of a member that was left out and returns begin at zero again.
            more = counted[member] - self._counted.get(member, 0)
            if more > 0:
                self._contributed[member] = self._contributed.get(member, 0) + more
        self._counted = counted

    def refresh(self, rank: RankState, now_ns: int) -> bool:
        """Compute the facts again if the last ones are older than REFRESH_NS.

        Args:
            rank: State of this rank.
            now_ns: The present time.

        Returns:
            True if they were computed.
        """
        if now_ns - self._refreshed_ns < REFRESH_NS:
            return False
        self._refreshed_ns = now_ns
        done = _progress(rank.log)
        if done is not None:
            self._speed.follow(now_ns, done, rank.log.ledger)
        self.compute(rank)
        return True

    def compute(self, rank: RankState) -> None:
        """Compute the facts now."""
        if self._steps_ns:
            self._step_s = round(median(self._steps_ns) / NS_PER_S, 6)
        facts: dict[str, float] = {
            Fact.LAG_S: median(self._lags_us) / US_PER_S if self._lags_us else 0.0,
            Fact.WAIT_S: self._wait_ns / NS_PER_S,
        }
        self.log = self._read_log(rank) if reports_the_log(rank) else None
        if self.log is not None:
            facts |= pack_log(self.log)
            epoch = epochs_done(rank.log)
            if epoch is not None:
                facts[Fact.EPOCH] = epoch
        self._facts = facts | self.squares | self._recorded()

    def heartbeat(
        self, rank: RankState, doing: Doing | None = None, away: Away | None = None
    ) -> Heartbeat:
        """Return the heartbeat for the rank's present state. Link thread, holding the state's lock.

        Args:
            rank: State of this rank.
            doing: What the communication thread is busy with (R35).
            away: Since when the script has not come back, if that is long ago.

        Returns:
            A new message.
        """
        takes_part = rank.has_state and not rank.passive
        return Heartbeat(
            member=rank.me,
            promise=rank.promise,
            last=rank.log.id,
            version=rank.log.version,
            leaving=rank.wants_to_leave,
            stopped=rank.has_state and rank.log.stopped,
            doing=doing,
            active=takes_part and rank.is_active,
            benched=takes_part and not rank.is_active,
            done=rank.main is Main.DONE,
            outside=rank.outside,
            step_s=self._step_s,
            away=away,
        )

    def figures(self, rank: RankState) -> RankFigures:
        """Return the facts that were computed last, as a message for the coordinator."""
        return RankFigures(rank.me, rank.log.version, self._facts)

    def _read_log(self, rank: RankState) -> LogStatus:
        log, ledger = rank.log, rank.log.ledger
        total, progress = ledger.total(), _progress(log)
        self._count_shares()
        return LogStatus(
            rounds={str(trigger): count for trigger, count in ledger.rounds.items()},
            streamed=ledger.streamed,
            gradients=ledger.contributions,
            gradients_before=ledger.contributions_before,
            samples_left_out=left_out_per_epoch(log.plan),
            samples_applied=total.applied,
            samples_late=total.late,
            samples_dropped={str(reason): count for reason, count in ledger.dropped.items()},
            samples_redealt=total.redealt,
            samples_discounted=total.discounted,
            updates=log.updates,
            operations={str(kind): count for kind, count in self._operations.items()},
            epochs_exact=ledger.epochs_exact,
            epochs_short=ledger.epochs_short,
            progress=progress,
            left_s=self._speed.left_s if progress is not None else None,
            round_s=log.median_round_us / US_PER_S,
            avoided_s=self._avoided_ns / NS_PER_S,
            shares={
                str(member): self._contributed.get(member, 0) / self._active[member]
                for member in log.members
                if self._active.get(member)
            },
            shadow=_shadow(log.shadow) if log.shadow.rounds else None,
            metrics=_means(since(ledger.metrics, self._sums[0] if self._sums else {})),
            metrics_of_epoch=_means(ledger.last_epoch),
            metric_sums=dict(ledger.metrics),
        )


def _without(log: Log, go: Go) -> dict[str, tuple[float, float]]:
    """Return the script's figures before the last round of the log, which was `go`."""
    own = {metric.name: (metric.total, metric.weight) for metric in figures_of(go)}
    sums = dict(log.ledger.metrics)
    return sums | {
        name: (sums[name][0] - total, sums[name][1] - weight)
        for name, (total, weight) in own.items()
    }


def figures_of(go: Go) -> tuple[LoggedMetric, ...]:
    """Return the script's figures of one round, summed over its contributors."""
    figures = (*go.metrics, *(metric for share in go.listed for metric in share.metrics))
    return summed(figures)


def _means(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each figure that has a weight."""
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


def reports_the_log(rank: RankState) -> bool:
    """Return True on the one rank that reports the log's figures: the lowest active one."""
    return rank.log.active[:1] == (rank.me,)


def epochs_done(log: Log) -> float | None:
    """Return the epochs done so far; None if the data of an epoch are not known."""
    if not (log.plan.samples and log.plan.epochs):
        return None
    total = log.ledger.total()
    return (total.applied + total.dropped) / (log.plan.samples - left_out_per_epoch(log.plan))


def _progress(log: Log) -> float | None:
    """Return the job's progress from 0 to 1; None if the job has no known end."""
    whole = (log.plan.samples - left_out_per_epoch(log.plan)) * log.plan.epochs
    if whole:
        total = log.ledger.total()
        return min(1.0, (total.applied + total.dropped) / whole)
    return min(1.0, float(log.steps / log.plan.steps)) if log.plan.steps else None


def _shadow(report: ShadowReport) -> ShadowStatus:
    return ShadowStatus(
        rounds=report.rounds,
        fresh=report.fresh,
        waited_s=report.waited_us / US_PER_S,
        saved_s={
            str(mode): hindsight.saved_us / US_PER_S for mode, hindsight in report.modes.items()
        },
        late={str(mode): hindsight.late for mode, hindsight in report.modes.items()},
    )
