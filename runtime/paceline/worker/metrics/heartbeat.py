"""A rank's heartbeat, and its figures for `status` (`core.status.Fact`).

Called by the communication thread. For `heartbeat` and `figures` the link thread holds the lock of
the rank's state, and they read nothing else that changes in place. What the log says is equal on
all ranks: only the lowest active one tells it (R42). The hot path stores a few numbers; the facts
are worked out at most every REFRESH_NS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median
from typing import Final

from paceline.clock import NS_PER_S
from paceline.core.messages import Away, Doing, Figures, Heartbeat
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.ledger import Ledger, since
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import GivenUp, Go, summed
from paceline.core.protocol.sampling import left_out_per_epoch
from paceline.core.protocol.shadow import ShadowReport
from paceline.core.rank.state import Main, RankState
from paceline.core.status import METRIC_ROUNDS, Fact
from paceline.worker.metrics.pace import Pace

REFRESH_NS: Final = 150_000_000
RECENT: Final = 32
US_PER_S: Final = 1e6


class HeartbeatFacts:
    """One rank's."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, float] = {}
        """Of `worker.metrics.rounds`."""
        self.carried: dict[str, float] = {}
        """Size classes that each transport moves; empty for a rank alone."""
        self.squares: dict[str, float] = {}
        """Of `worker.metrics.squares`; empty in a run that nobody measures."""
        self._facts: dict[str, float] = {}
        """Replaced as a whole, so that the link thread may read it at any time."""
        self._refreshed_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=RECENT)
        self._step_s = 0.0
        """Their median when the facts were worked out last."""
        self._pace = Pace()
        self._lags_us: deque[int] = deque(maxlen=RECENT)
        self._resumed_ns: int | None = None
        self._parked_ns: int | None = None
        self._wait_ns = 0
        self._avoided_ns = 0
        self._given_up: dict[str, float] = {}
        self._contributed: dict[MemberId, int] = {}
        self._active: dict[MemberId, int] = {}
        """Rounds in which each was active. The last ones, in which the same ranks were, are not in
        it yet, nor are their contributions in the dictionary above."""
        self._active_now: tuple[MemberId, ...] = ()
        self._active_rounds = 0
        self._ledger: Ledger | None = None
        self._counted: dict[MemberId, int] = {}
        """Rounds with a contribution of each that the ledger held when it was looked at last."""
        self._sums: deque[dict[str, tuple[float, float]]] = deque(maxlen=METRIC_ROUNDS + 1)
        """The script's figures after each of the last rounds, and before the first of them."""

    def stepped(self, now_ns: int) -> None:
        """The main thread announces a gradient and is parked."""
        if self._resumed_ns is not None:
            self._steps_ns.append(now_ns - self._resumed_ns)
        self._parked_ns = now_ns

    def resumed(self, now_ns: int) -> None:
        self._resumed_ns = now_ns
        if self._parked_ns is not None:
            self._wait_ns += now_ns - self._parked_ns
            self._parked_ns = None

    def avoided(self, spent_ns: int) -> None:
        self._avoided_ns += spent_ns

    def applied(self, go: Go, rank: RankState, lag_us: int | None) -> None:
        """`lag_us`: of this rank's fresh arrival, None if it had none."""
        if lag_us is not None:
            self._lags_us.append(lag_us)
        log = rank.log
        if log.ledger is not self._ledger:
            # A donor's log or a checkpoint's: what it has counted before is not of these rounds.
            self._sums.clear()
            self._sums.append(_without(log, go))
        if log.active is not self._active_now or log.ledger is not self._ledger:
            self._follow_anew(log, go)
        self._active_rounds += 1
        self._sums.append(dict(log.ledger.metrics))

    def _follow_anew(self, log: Log, go: Go) -> None:
        """Others are active from now on, or the whole log is another one (a donor's)."""
        now = set(log.read(go).contributors)
        if log.ledger is self._ledger:
            self._count_shares(but_for=now)
        else:
            self._ledger, self._active_rounds = log.ledger, 0
            counted = log.ledger.by_member
            self._counted = {m: t.rounds - (m in now) for m, t in counted.items()}
        self._active_now = log.active

    def _count_shares(self, but_for: Collection[MemberId] = ()) -> None:
        """Take over what the ledger has counted; `but_for`: contributors of a round in it that
        belongs to what comes next."""
        for member in self._active_now:
            self._active[member] = self._active.get(member, 0) + self._active_rounds
        self._active_rounds = 0
        if self._ledger is None:
            return
        counted: dict[MemberId, int] = {}
        for member, totals in self._ledger.by_member.items():
            counted[member] = totals.rounds - (member in but_for)
            # Those of a member that was left out and is back are counted anew.
            more = counted[member] - self._counted.get(member, 0)
            if more > 0:
                self._contributed[member] = self._contributed.get(member, 0) + more
        self._counted = counted

    def refresh(self, rank: RankState, now_ns: int) -> bool:
        """Work out the facts again if the last ones are old; False if they are not."""
        if now_ns - self._refreshed_ns < REFRESH_NS:
            return False
        self._refreshed_ns = now_ns
        done = _progress(rank.log)
        if done is not None:
            self._pace.follow(now_ns, done, rank.log.ledger)
        self.work_out(rank)
        return True

    def work_out(self, rank: RankState) -> None:
        if self._steps_ns:
            self._step_s = round(median(self._steps_ns) / NS_PER_S, 6)
        logged = self._logged(rank) if tells_of_the_log(rank) else {}
        told = self.checkpoints | self.carried | self.squares
        self._facts = self._measured() | logged | told

    def gave_up(self, why: GivenUp) -> None:
        """A streamed round."""
        self._given_up[Fact.GIVEN_UP + why] = self._given_up.get(Fact.GIVEN_UP + why, 0.0) + 1

    def heartbeat(
        self, rank: RankState, doing: Doing | None = None, away: Away | None = None
    ) -> Heartbeat:
        """The rank's present state."""
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
            step_s=self._step_s,
            away=away,
        )

    def figures(self, rank: RankState) -> Figures:
        """The last ones that were worked out."""
        return Figures(rank.me, rank.log.version, self._facts)

    def _measured(self) -> dict[str, float]:
        return {
            Fact.LAG_S: median(self._lags_us) / US_PER_S if self._lags_us else 0.0,
            Fact.WAIT_S: self._wait_ns / NS_PER_S,
            Fact.AVOIDED_S: self._avoided_ns / NS_PER_S,
            **self._given_up,
        }

    def _logged(self, rank: RankState) -> dict[str, float]:
        log, ledger = rank.log, rank.log.ledger
        total = ledger.total()
        facts: dict[str, float] = {
            Fact.GRADIENTS: float(ledger.contributions),
            Fact.GRADIENTS_BEFORE: float(ledger.contributions_before),
            Fact.LEFT_OUT: float(left_out_per_epoch(log.plan)),
            Fact.APPLIED: float(total.applied),
            Fact.LATE: float(total.late),
            Fact.REDEALT: float(total.redealt),
            Fact.DISCOUNTED: total.discounted,
            Fact.UPDATES: float(log.updates),
            Fact.EPOCHS_EXACT: float(ledger.epochs_exact),
            Fact.EPOCHS_SHORT: float(ledger.epochs_short),
            Fact.ROUND_S: log.median_round_us / US_PER_S,
        }
        facts[Fact.STREAMED] = float(ledger.streamed)
        for trigger, count in ledger.rounds.items():
            facts[Fact.ROUNDS + trigger] = float(count)
        for reason, samples in ledger.dropped.items():
            facts[Fact.DROPPED + reason] = float(samples)
        if log.plan.samples and log.plan.epochs:
            dealt = log.plan.samples - left_out_per_epoch(log.plan)
            facts[Fact.EPOCH] = (total.applied + total.dropped) / dealt
        done = _progress(log)
        if done is not None:
            facts[Fact.PROGRESS] = done
            if self._pace.left_s is not None:
                facts[Fact.LEFT_S] = self._pace.left_s
        self._count_shares()
        for member in log.members:
            if self._active.get(member):
                share = self._contributed.get(member, 0) / self._active[member]
                facts[Fact.SHARE + str(member)] = share
        if log.shadow.rounds:
            facts |= _shadow(log.shadow)
        facts |= _means(Fact.METRIC, since(ledger.metrics, self._sums[0] if self._sums else {}))
        facts |= _means(Fact.METRIC_EPOCH, ledger.last_epoch)
        for name, (value, weight) in ledger.metrics.items():
            facts |= {Fact.METRIC_SUM + name: value, Fact.METRIC_WEIGHT + name: weight}
        return facts


def _without(log: Log, go: Go) -> dict[str, tuple[float, float]]:
    """Return the script's figures before the last round of the log, which was `go`."""
    figures = (*go.metrics, *(metric for share in go.listed for metric in share.metrics))
    own = {metric.name: (metric.total, metric.weight) for metric in summed(figures)}
    sums = dict(log.ledger.metrics)
    return sums | {
        name: (sums[name][0] - total, sums[name][1] - weight)
        for name, (total, weight) in own.items()
    }


def _means(prefix: str, sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {prefix + name: total / weight for name, (total, weight) in sums.items() if weight}


def tells_of_the_log(rank: RankState) -> bool:
    return rank.me == min(rank.log.active, default=None)


def _progress(log: Log) -> float | None:
    """From 0 to 1; None where nothing says where the end is."""
    whole = (log.plan.samples - left_out_per_epoch(log.plan)) * log.plan.epochs
    if whole:
        total = log.ledger.total()
        return min(1.0, (total.applied + total.dropped) / whole)
    return min(1.0, float(log.steps / log.plan.steps)) if log.plan.steps else None


def _shadow(report: ShadowReport) -> dict[str, float]:
    facts: dict[str, float] = {
        Fact.SHADOW_ROUNDS: float(report.rounds),
        Fact.SHADOW_FRESH: float(report.fresh),
        Fact.SHADOW_WAITED_S: report.waited_us / US_PER_S,
    }
    for mode, seen in report.modes.items():
        facts[Fact.SHADOW_SAVED_S + mode] = seen.saved_us / US_PER_S
        facts[Fact.SHADOW_LATE + mode] = float(seen.late)
    return facts
