"""What a rank measures: facts for the heartbeat, figures for Prometheus. No decision reads them.

Everything is called by the communication thread; the hot path stores a few numbers, and the facts
are worked out at most every REFRESH_NS.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from paceline.clock import NS_PER_S
from paceline.core.log import Weighing
from paceline.core.messages import Heartbeat
from paceline.core.rank import events as ev
from paceline.core.rank.state import Main, RankState
from paceline.core.records import Go
from paceline.core.status import Fact

REFRESH_NS: Final = 150_000_000
RECENT: Final = 32


class Gauges:
    """One rank's figures."""

    def __init__(self) -> None:
        self.facts: dict[str, float] = {}
        """Replaced as a whole, so that the link thread may read it at any time."""
        self._refreshed_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=RECENT)
        self._lags_us: deque[int] = deque(maxlen=RECENT)
        self._resumed_ns: int | None = None
        self._parked_ns: int | None = None
        self._wait_ns = 0
        self._avoided_us = 0
        self._rounds: dict[str, int] = {}
        self._gradients = 0
        self._contributed: dict[str, int] = {}
        self._active: dict[str, int] = {}
        self.transport: dict[str, str] = {}

    # ---- called by the driver -------------------------------------------------------------

    def handled(self, rank: RankState, event: ev.Event, now_ns: int) -> None:
        if isinstance(event, ev.Step):
            if self._resumed_ns is not None:
                self._steps_ns.append(now_ns - self._resumed_ns)
            self._parked_ns = now_ns

    def resumed(self, now_ns: int) -> None:
        self._resumed_ns = now_ns
        if self._parked_ns is not None:
            self._wait_ns += now_ns - self._parked_ns
            self._parked_ns = None

    def copied(self, spent_ns: int) -> None:
        """Weights were copied into the model."""

    def opened(self, transport: dict[str, str]) -> None:
        self.transport = transport

    def reduced(self, go: Go, payload_bytes: int, spent_ns: int) -> None:
        """The sum is complete."""

    def applied(
        self, go: Go, weighing: Weighing, rank: RankState, now_ns: int, spent_ns: int
    ) -> None:
        self._rounds[go.trigger] = self._rounds.get(go.trigger, 0) + 1
        for share in go.shares:
            if share.count:
                name = str(share.member)
                self._gradients += share.count
                self._contributed[name] = self._contributed.get(name, 0) + 1
            if share.member == rank.me and share.fresh:
                self._lags_us.append(share.offset_us)
        for member in rank.log.active:
            name = str(member)
            self._active[name] = self._active.get(name, 0) + 1

    def refresh(self, rank: RankState, now_ns: int) -> None:
        """Work out the facts again if the last ones are old."""
        if now_ns - self._refreshed_ns < REFRESH_NS:
            return
        self._refreshed_ns = now_ns
        self.work_out(rank)

    def work_out(self, rank: RankState) -> None:
        self.facts = self._facts(rank)

    def heartbeat(self, rank: RankState) -> Heartbeat:
        """The rank's present state, with the last facts; the link thread asks for it, too."""
        return Heartbeat(
            member=rank.me,
            promise=rank.promise,
            last=rank.log.id,
            version=rank.log.version,
            leaving=rank.wants_to_leave,
            stopped=rank.has_state and rank.log.stopped,
            facts=self.facts,
        )

    # ---- facts ----------------------------------------------------------------------------

    def _facts(self, rank: RankState) -> dict[str, float]:
        log, ledger = rank.log, rank.log.ledger
        total = ledger.total()
        facts: dict[str, float] = {
            Fact.STEP_S: median(self._steps_ns) / NS_PER_S if self._steps_ns else 0.0,
            Fact.LAG_S: median(self._lags_us) / 1e6 if self._lags_us else 0.0,
            Fact.WAIT_S: self._wait_ns / NS_PER_S,
            "active": float(rank.has_state and not rank.passive and rank.is_active),
            "benched": float(rank.has_state and not rank.passive and not rank.is_active),
            "running": float(rank.main is Main.RUN),
            Fact.GRADIENTS: float(self._gradients),
            Fact.APPLIED: float(total.applied),
            Fact.LATE: float(total.late),
            Fact.REDEALT: float(total.redealt),
            Fact.DISCOUNTED: total.discounted,
            Fact.UPDATES: float(log.updates),
            Fact.EPOCHS_EXACT: float(ledger.epochs_exact),
            Fact.EPOCHS_SHORT: float(ledger.epochs_short),
            Fact.ROUND_S: log.median_round_us / 1e6,
        }
        for trigger, count in self._rounds.items():
            facts[Fact.ROUNDS + trigger] = float(count)
        for reason, samples in ledger.dropped.items():
            facts[Fact.DROPPED + reason] = float(samples)
        whole = log.plan.samples * log.plan.epochs
        if whole:
            facts[Fact.PROGRESS] = min(1.0, (total.applied + total.dropped) / whole)
            facts[Fact.EPOCH] = (total.applied + total.dropped) / log.plan.samples
        for member in log.members:
            name = str(member)
            if self._active.get(name):
                share = self._contributed.get(name, 0) / self._active[name]
                facts[Fact.SHARE + name] = share
        for name, (value, weight) in ledger.metrics.items():
            if weight:
                facts[Fact.METRIC + name] = value / weight
        return facts
