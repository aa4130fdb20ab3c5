"""Metrics that are written into the rank's record for each round: times, samples, stragglers.

`telemetry.catalog` explains each metric. The communication thread calls everything here, with two
exceptions: in a streamed round the data thread calls `RoundMetrics.carried` and
`RoundMetrics.failed`. The main thread's metrics are in `worker.metrics.loop`. A handle with labels
is made when its series is first needed, so a page shows nothing that a job does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_S, NS_PER_US, US_PER_S
from paceline_api.types.enums import Mode

from paceline.core.collectives.conduct import Conduct
from paceline.core.collectives.select import CLASS_NAMES, Method
from paceline.core.messages import RankFigures
from paceline.core.protocol.bits import chosen
from paceline.core.protocol.composition import Composition
from paceline.core.protocol.records import DropReason, GivenUp, Go, Share, Trigger
from paceline.core.protocol.shadow import PARTIAL, Hindsight, ShadowReport
from paceline.core.rank import events as ev
from paceline.core.rank.state import Main, RankState, Saving
from paceline.refusals import PROCESS
from paceline.telemetry.records import Counter, Gauge, RankRecord
from paceline.worker.metrics.board import Board
from paceline.worker.metrics.heartbeat import (
    HeartbeatFacts,
    epochs_done,
    figures_of,
    reports_the_log,
)
from paceline.worker.metrics.job import JobMetrics
from paceline.worker.metrics.membership import MembershipMetrics
from paceline.worker.metrics.waits import AvoidedWaiting

# A member of an enum is looked up through Python code in 3.11, so the round's path uses these.
_PARKED: Final = Main.PARKED
_SHADOW: Final = Mode.SHADOW


class RoundMetrics:
    """One rank's metrics of rounds; see the module for the threads that call it."""

    def __init__(self, record: RankRecord, me: MemberId) -> None:
        self.facts = HeartbeatFacts(record.facts)
        self._job = JobMetrics(record)
        self._membership = MembershipMetrics(record)
        self._avoided = AvoidedWaiting(me)
        self._stepped_ns = 0
        """Time of the announcement whose gradient is in no round yet; 0 = there is none."""
        self._behind_ns = 0
        """Time of the announcement after that one, which waits for its round (R36); 0 = none."""
        self._go_ns = 0
        self._applied_ns = 0
        self._mode = Mode.FULL
        self._go: Go | None = None
        """The last round that was reduced here."""
        self._own: Share | None = None
        self._jumps_seen = 0
        self._applied_seen, self._late_seen = 0, 0
        self._choices: list[Gauge] = []
        self._record = record
        self.ring = record.rounds
        self.board: Board | None = None
        """Writer of the script's figures for TensorBoard; None unless the job asks for it."""
        self._coming_ns = 0
        """Time at which COMING was handled for the batch in hand."""
        self._arrived_ns = 0
        """This rank's arrival for the round in flight; 0 = none."""
        self._shadow: ShadowMetrics | None = None
        self._last_mode: Mode | None = None
        self._last_trigger: Trigger | None = None
        """Mode and trigger of the last round, to which `_rounds` belongs."""
        self._carrier: Method | None = None
        """The method to which `_carried` belongs."""
        self._refused_in_all = 0
        self._make_handles(record)

    def _make_handles(self, record: RankRecord) -> None:
        counter, histogram = record.counter, record.histogram
        self._rounds_of = cache(lambda m, t: counter("paceline_rounds_total", mode=m, trigger=t))
        self._round_s = histogram("paceline_round_duration_seconds")
        self._wait_s = histogram("paceline_round_wait_seconds")
        self._transfer_s = histogram("paceline_round_transfer_seconds")
        self._update_s = counter("paceline_update_seconds_total")
        self._carried_by = cache(lambda c: _Carried(record, c))
        self._errors = cache(lambda t: counter("paceline_transport_errors_total", transport=t))
        self._selected = cache(
            lambda c, size: record.gauge(
                "paceline_transport_selected_info",
                transport=c.transport,
                algorithm=c.algorithm,
                size_class=size,
            )
        )
        self._sums = cache(
            lambda name, wire, bits: record.gauge(
                "paceline_transport_sums_info", transport=name, wire=wire, bits=bits
            )
        )
        self._regret_of = cache(
            lambda size: record.gauge("paceline_transport_regret_seconds", size_class=size)
        )
        self._streamed = counter("paceline_rounds_streamed_total")
        self._hidden_s = counter("paceline_transfer_hidden_seconds_total")
        self._refused = cache(lambda e, r: counter("paceline_refused_total", entry=e, refusal=r))
        self._given_up = cache(lambda r: counter("paceline_rounds_given_up_total", cause=r))
        self._copies = counter("paceline_weight_copies_total")
        self._copy_s = counter("paceline_weight_copy_seconds_total")
        self._lag_s = histogram("paceline_arrival_lag_seconds")
        self._last = counter("paceline_arrivals_last_total")
        self._blamed_s = counter("paceline_blamed_seconds_total")
        self._avoided_s = counter("paceline_wait_avoided_seconds_total")
        self._participation = histogram("paceline_participation_ratio")
        self._age = histogram("paceline_contribution_age_rounds")
        self._jumps = counter("paceline_jumps_total")
        self._fresh = counter("paceline_samples_total", kind="fresh")
        self._late = counter("paceline_samples_total", kind="late")
        self._absent: int | None = None
        """Samples of slots without a rank, as of the last round; None before the first one."""
        self._dropped = cache(lambda r: counter("paceline_samples_dropped_total", reason=r))

    # ---- called by the communication thread, or the data thread -------------------------

    def handled(self, rank: RankState, event: ev.Event, now_ns: int) -> None:
        """Note an event that the state machine has handled; its effects are still to come."""
        if isinstance(event, ev.Step):
            self.facts.stepped(now_ns)
            if rank.main is _PARKED and rank.under_way == rank.log.version:
                self._behind_ns = now_ns
            else:
                self._stepped_ns, self._behind_ns = now_ns, 0
        elif isinstance(event, ev.Coming):
            self._coming_ns = now_ns
        if rank.facts.jumps != self._jumps_seen:
            self._jumps.add(rank.facts.jumps - self._jumps_seen)
            self._jumps_seen = rank.facts.jumps
        if self._membership.follow(rank, now_ns):
            self._avoided.reset()

    def refresh(self, rank: RankState, now_ns: int) -> None:
        """Export what may be computed now, since the communication thread is about to wait."""
        if PROCESS.total != self._refused_in_all:
            self._export_refusals()
        if self.facts.refresh(rank, now_ns):
            self._export_job(rank)

    def _export_refusals(self) -> None:
        self._refused_in_all = PROCESS.total
        for labels, count in PROCESS.counts().items():
            self._refused(*labels).raise_to(count)

    def last_figures(self, rank: RankState) -> RankFigures:
        """Compute and export all facts now, and return them as a message."""
        self.facts.compute(rank)
        self._export_job(rank)
        return self.facts.figures(rank)

    def _export_job(self, rank: RankState) -> None:
        """Export the figures of the whole job, or clear them if another rank exports them."""
        if self.facts.log is not None:
            self._job.export(self.facts.log, epochs_done(rank.log))
        else:
            self._job.clear()

    def copied(self, begun_ns: int, ended_ns: int) -> None:
        """Count a copy of the weights into the model."""
        self._copies.add()
        self._copy_s.add((ended_ns - begun_ns) / NS_PER_S)
        self.ring.copied(begun_ns, ended_ns)

    def opened(
        self,
        methods: Sequence[Method],
        regrets_s: Sequence[float],
        conducts: Sequence[Conduct],
    ) -> None:
        """Export the choices of a data channel that was just connected.

        Args:
            methods: Transport and algorithm of each size class.
            regrets_s: Seconds per reduction that this rank loses by the choice, for each size
                class.
            conducts: How each chosen transport sums.
        """
        for choice in self._choices:
            choice.clear()
        self._choices = [self._selected(c, n) for c, n in zip(methods, CLASS_NAMES, strict=False)]
        self._choices += [self._sums(c.transport, c.travels_as, c.bits) for c in conducts]
        for choice in self._choices:
            choice.set(1.0)
        for name, regret_s in zip(CLASS_NAMES, regrets_s, strict=False):
            self._regret_of(name).set(regret_s)

    def failed(self, method: Method) -> None:
        """Count a failed reduction. Communication or data thread."""
        self._errors(method.transport).add()

    def reducing(self, go: Go, rank: RankState, now_ns: int) -> None:
        """Note that GO has arrived and the reduction begins; the log does not hold it yet."""
        self._go_ns = now_ns
        if rank.passive:
            return  # a passive rank has no log and contributes nothing
        self._mode = rank.log.settings.mode
        self._go = go
        self.ring.begin(go.round, now_ns, streamed=go.streamed)
        made = rank.log.read(go)
        own = self._own = made.share_of(rank.me)
        self._arrived_ns = 0
        if own is not None and own.fresh:
            # In a streamed round, a rank that had stepped already counts with its step.
            came = go.streamed and rank.me in chosen(go.coming, rank.log.active)
            self._arrived_ns = self._coming_ns if came else self._stepped_ns
        if self._arrived_ns:
            self.ring.arrived(self._arrived_ns)
            self._wait_s.observe((now_ns - self._arrived_ns) / NS_PER_S)
            if not go.streamed:
                self._stepped_ns, self._behind_ns = self._behind_ns, 0
        if rank.log.settings.pipeline:
            return  # with a pipeline, Full would wait at other places
        own_ns, total_ns = self._avoided.started(made, rank.log.active, now_ns)
        if total_ns:
            self.facts.avoided(total_ns)
            self._avoided_s.add(own_ns / NS_PER_S)

    def reduced(self, now_ns: int) -> None:
        """Note that the sum is complete."""
        self._transfer_s.observe((now_ns - self._go_ns) / NS_PER_S)

    def streamed(self, hidden_ns: int) -> None:
        """Count a streamed round, with the transfer time that was hidden behind backward()."""
        self._stepped_ns = 0  # the step came while the round was in flight
        self._streamed.add()
        self._hidden_s.add(hidden_ns / NS_PER_S)

    def voided(self, own: GivenUp | None) -> None:
        """Count a streamed round that was void, and this rank's reason if it caused that."""
        self._rounds_of(self._mode, Trigger.VOID).add()
        if own is not None:
            self._given_up(own).add()

    def carried(self, method: Method, payload_bytes: int, begun_ns: int, ended_ns: int) -> None:
        """Count a buffer that the data channel has summed. Communication or data thread."""
        self.ring.carried(begun_ns, ended_ns)
        if method is not self._carrier:
            self._carrier, self._carried = method, self._carried_by(method)
        self._carried.payload_bytes.add(payload_bytes)
        self._carried.seconds.add((ended_ns - begun_ns) / NS_PER_S)

    def applied(self, go: Go, rank: RankState, now_ns: int, spent_ns: int) -> None:
        """Count a round that is committed.

        Args:
            go: The round.
            rank: State of this rank, whose log holds the round.
            now_ns: When the update was complete.
            spent_ns: How long the update took, in nanoseconds.
        """
        mode, trigger, log = self._mode, go.trigger, rank.log
        if trigger is not self._last_trigger or mode is not self._last_mode:
            self._last_mode, self._last_trigger = mode, trigger
            self._rounds = self._rounds_of(mode, trigger)
        self._rounds.add()
        if mode is _SHADOW:
            self._shadow = self._shadow or ShadowMetrics(self._record)
            self._shadow.follow(log.shadow)
        if self._applied_ns:
            self._round_s.observe((now_ns - self._applied_ns) / NS_PER_S)
        self._applied_ns = now_ns
        self._update_s.add(spent_ns / NS_PER_S)
        active = len(log.active) - len(go.admitted) + len(go.benched)
        self._participation.observe(go.contributing / active)
        own = self._own if go is self._go else log.read(go).share_of(rank.me)
        lag_us = None
        last, last_ns = None, 0
        if own is not None:
            if own.fresh:
                made = log.read(go)
                lag_us, last_us = self._arrivals(made, own)
                if last_us > own.offset_us and self._arrived_ns:
                    last = made.fresh_at(last_us)
                    last_ns = self._arrived_ns + (last_us - own.offset_us) * NS_PER_US
            if own.count:
                self._age.observe(go.round - own.oldest)
            for drop in own.drops:
                self._dropped(drop.reason).add(drop.samples)
            self._samples(rank)
            if log.ledger.dropped or self._absent != 0:
                self._count_absent(go, rank)
        if go is self._go:
            self.ring.end(last, last_ns, now_ns - spent_ns, now_ns)
        self._membership.applied(go, rank, now_ns)
        self.facts.applied(go, rank, lag_us)
        if self.board is not None and reports_the_log(rank):
            self.board.add(go.round, figures_of(go))

    # ---- inside ---------------------------------------------------------------------------

    def _count_absent(self, go: Go, rank: RankState) -> None:
        """Count what slots without a rank have left, on the lowest rank that took part."""
        total = rank.log.ledger.dropped.get(DropReason.ABSENT, 0)
        before, self._absent = self._absent, total
        if before is None or total == before:
            return
        if rank.log.read(go).contributors[:1] == (rank.me,):
            self._dropped(DropReason.ABSENT).add(total - before)

    def _arrivals(self, made: Composition, own: Share) -> tuple[int, int]:
        """Count this rank's arrival compared to the others', on the starter's clock.

        Args:
            made: The round.
            own: This rank's share, which is fresh.

        Returns:
            How long after the first rank this one arrived, and when the last one arrived, in
            microseconds.
        """
        arrivals, own_us = made.arrivals, own.offset_us
        fresh_us = sorted(arrivals.fresh_us)
        lag_us = own_us - fresh_us[0]
        self._lag_s.observe(lag_us / US_PER_S)
        if len(fresh_us) > 1 and own_us > fresh_us[-2]:
            self._last.add()
            before_us = max([fresh_us[-2], *arrivals.idle_us])
            waited_us = max(0, own_us - before_us) * (len(fresh_us) - 1)
            self._blamed_s.add(waited_us / US_PER_S)
        return lag_us, fresh_us[-1]

    def _samples(self, rank: RankState) -> None:
        """Count the samples that the log has counted since the last call."""
        own = rank.log.ledger.by_member[rank.me]
        if own.applied < self._applied_seen:
            self._applied_seen, self._late_seen = 0, 0  # a rank that returns is counted from 0
        late = own.late - self._late_seen
        self._fresh.add(own.applied - self._applied_seen - late)
        if late:
            self._late.add(late)
        self._applied_seen, self._late_seen = own.applied, own.late


class _Carried:
    """Handles of one transport with one algorithm."""

    def __init__(self, record: RankRecord, method: Method) -> None:
        labels = {"transport": method.transport, "algorithm": method.algorithm}
        self.payload_bytes: Counter = record.counter("paceline_payload_bytes_total", **labels)
        self.seconds: Counter = record.counter("paceline_transfer_seconds_total", **labels)


class ShadowMetrics:
    """Metrics of Shadow's report (`core.protocol.shadow`); made after the first round in Shadow.

    The log's report covers the whole job. A record counts what its rank observed, so that a rank
    that is started again in the same place does not count the rounds before it twice.
    """

    def __init__(self, record: RankRecord) -> None:
        counter = record.counter
        self._waited_s = counter("paceline_shadow_waited_seconds_total")
        self._saved_s = {m: counter("paceline_shadow_saved_seconds_total", mode=m) for m in PARTIAL}
        self._late = {m: counter("paceline_shadow_late_gradients_total", mode=m) for m in PARTIAL}
        self._previous: ShadowReport | None = None

    def follow(self, report: ShadowReport) -> None:
        """Count what a round in Shadow added; the first report is where counting begins."""
        previous, self._previous = self._previous, report
        if previous is None:
            return
        self._waited_s.add((report.waited_us - previous.waited_us) / US_PER_S)
        for mode, now in report.modes.items():
            before = previous.modes.get(mode, Hindsight())
            self._saved_s[mode].add((now.saved_us - before.saved_us) / US_PER_S)
            self._late[mode].add(now.late - before.late)


class CheckpointMetrics:
    """Results of checkpoints, as `core.rank.saving` counts them, and the seconds they cost."""

    def __init__(self, record: RankRecord) -> None:
        self._version = record.gauge("paceline_checkpoint_rounds")
        self._exposed_s = record.counter("paceline_checkpoint_exposed_seconds_total")
        self._hidden_s = record.counter("paceline_checkpoint_hidden_seconds_total")
        self._results = cache(lambda r: record.counter("paceline_checkpoints_total", result=r))

    def follow(self, saving: Saving, exposed_s: float, hidden_s: float) -> None:
        """Export the totals of this rank so far.

        Args:
            saving: The results.
            exposed_s: Seconds for which the communication thread copied.
            hidden_s: Seconds for which the writer worked beside training.
        """
        self._exposed_s.raise_to(exposed_s)
        self._hidden_s.raise_to(hidden_s)
        totals = {"written": saving.written, "failed": saving.failed, "skipped": saving.skipped}
        for result, total in totals.items():
            if total:
                self._results(result).raise_to(total)
        if saving.published is not None:
            self._version.set(saving.published)
