"""The metrics that a rank writes into its record: all of the catalog, with correct values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from paceline.core.collectives.conduct import Conduct
from paceline.core.collectives.select import Method
from paceline.core.log_figures import unpack_figures
from paceline.core.messages import Endpoints
from paceline.core.protocol.bits import pack_bits
from paceline.core.protocol.composition import Composition
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import (
    Benched,
    DataPlan,
    Drop,
    DropReason,
    Gen,
    GivenUp,
    Go,
    LeftOut,
    LoggedMetric,
    Share,
    Trigger,
)
from paceline.core.rank import events as ev
from paceline.core.rank.state import RankState, Saving
from paceline.core.status import METRIC_ROUNDS, Fact
from paceline.refusals import PROCESS, Entry, RefusalReason, refuse
from paceline.telemetry.catalog import CATALOG, Writer
from paceline.telemetry.records import RankRecord
from paceline.worker.metrics.loop import LoopMetrics
from paceline.worker.metrics.rounds import CheckpointMetrics, RoundMetrics
from paceline.worker.metrics.waits import AvoidedWaiting
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.status import LogStatus
from paceline_api.types.enums import Mode, Wire

MS = 1_000_000
A, B, C, D = (MemberId(slot, 0, 0) for slot in range(4))
PLAN = DataPlan(samples=1000, batch=2, epochs=1)
RING = Method("mpi", "ring")


@dataclass
class Spy:
    """A metric handle that records what is written, by metric and labels."""

    handle: Any
    key: tuple[str, ...]
    written: dict[tuple[str, ...], list[float]]

    def __getattr__(self, method: str) -> Callable[..., None]:
        def write(value: float = 1.0) -> None:
            self.written[self.key].append(value)
            getattr(self.handle, method)(value)

        return write

    def clear(self) -> None:
        self.written[self.key].clear()
        self.handle.clear()


@dataclass
class SpyRecord:
    """A real record, which refuses metrics that are not in the catalog, behind spies."""

    written: dict[tuple[str, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    real: RankRecord = field(default_factory=RankRecord.create)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.real, name)
        if name not in ("counter", "gauge", "histogram"):
            return member
        return lambda metric, **labels: Spy(
            member(metric, **labels), (metric, *labels.values()), self.written
        )

    def __getitem__(self, key: str | tuple[str, ...]) -> list[float]:
        name, *labels = (key,) if isinstance(key, str) else key
        return self.written[f"paceline_{name}", *labels]


class OneRank:
    """The metrics of rank A, driven by a log that the test writes."""

    def __init__(self) -> None:
        self.record = SpyRecord()
        self.metrics = RoundMetrics(self.record, A)  # type: ignore[arg-type]
        self.rank = RankState(A, 1, "here", Endpoints("", ""))
        self.now_ns = 1000 * MS

    def generation(self, *members: MemberId, left: tuple[LeftOut, ...] = ()) -> None:
        """Form a generation: promise, COMMIT and start, each 10 ms after the one before."""
        log = self.rank.log
        number = GenerationId(2, "uid", (log.gen.id.counter if log.gen else 0) + 1)
        first = log.gen is None
        self.rank.promise, self.rank.started = number, False
        self.event(ev.Connected())
        gen = Gen(
            id=number,
            members=members,
            with_state=members,
            active=members,
            version=log.version,
            left_out=left,
            lookahead=tuple((m, 2) for m in members),
            plan=PLAN if first else None,
            settings=RoundSettings(mode=Mode.QUORUM, quorum=1) if first else None,
        )
        log.append(gen)
        self.event(ev.Connected())
        self.rank.started = True
        self.metrics.opened([RING] * 3, [0.0, 0.0, 2e-6], [Conduct("mpi", Wire.BFLOAT16)])
        self.event(ev.ChannelOpened())

    def event(self, event: ev.Event, after_ms: int = 10) -> None:
        self.now_ns += after_ms * MS
        self.metrics.handled(self.rank, event, self.now_ns)

    def share(self, member: MemberId, at_ms: int, **more: Any) -> Share:
        """Return one lease of a member, fresh by default."""
        version, leases = self.rank.log.version, self.rank.log.held(member)[:1]
        fields: dict[str, Any] = {"fresh": True, "oldest": version, "upto": 1, "count": 1}
        fields |= {"samples": 2, "unit": 2, "leases": leases, **more}
        return Share(member=member, offset_us=at_ms * 1000, **fields)

    def round(self, *shares: Share, took_ms: int, trigger: str = "quorum", **more: Any) -> None:
        """Play a round: GO `took_ms` after the first arrival, sums 5 ms and update 6 ms later."""
        log = self.rank.log
        go = Go(log.id, log.version, Trigger(trigger), shares, wait_us=took_ms * 1000, **more)
        self.metrics.reducing(go, self.rank, self.now_ns)
        self.now_ns += 5 * MS
        self.metrics.carried(RING, 400, self.now_ns - 4 * MS, self.now_ns)
        self.metrics.reduced(self.now_ns)
        log.append(go)
        self.now_ns += MS
        self.metrics.applied(go, self.rank, self.now_ns, MS)
        self.metrics.copied(self.now_ns, self.now_ns + MS)

    def reported_log(self) -> LogStatus:
        """Compute the facts now, and return what they say about the log."""
        self.metrics.facts.compute(self.rank)
        _, log = unpack_figures(self.metrics.facts.figures(self.rank).facts)
        assert log is not None
        return log


@pytest.fixture
def one() -> Iterator[OneRank]:
    rank = OneRank()
    rank.generation(A, B, C)
    yield rank
    rank.record.real.close()


def test_a_round_with_all_ranks_writes_the_expected_metrics(one: OneRank) -> None:
    one.event(ev.Step((0,), 2, 2), after_ms=30)
    one.now_ns += 7 * MS
    one.round(one.share(A, 3), one.share(B, 0), one.share(C, 10), took_ms=10, trigger="all")
    record = one.record
    assert record["rounds_total", "Quorum", "all"] == [1.0]
    assert record["round_wait_seconds"] == [pytest.approx(0.007)]
    assert record["round_transfer_seconds"] == [pytest.approx(0.005)]
    assert record["arrival_lag_seconds"] == [pytest.approx(0.003)]
    assert record["participation_ratio"] == [1.0]
    assert record["contribution_age_rounds"] == [0]
    assert record["samples_total", "fresh"] == [2]
    assert sum(record["samples_total", "late"]) == 0
    assert record["arrivals_last_total"] == []
    assert record["wait_avoided_seconds_total"] == []
    assert record["payload_bytes_total", "mpi", "ring"] == [400]
    assert record["transfer_seconds_total", "mpi", "ring"] == [pytest.approx(0.004)]
    assert record["transport_selected_info", "mpi", "ring", "4KiB"] == [1.0]
    assert record["transport_sums_info", "mpi", "BFloat16", "order"] == [1.0]
    assert record["transport_regret_seconds", "1MiB"] == [2e-6]
    assert record["committed_rounds"][-1] == 1


def test_the_last_rank_is_blamed_for_the_waiting_time_of_all_others(one: OneRank) -> None:
    one.event(ev.Step((0,), 2, 2))
    one.round(one.share(A, 50), one.share(B, 0), one.share(C, 10), took_ms=50, trigger="all")
    assert one.record["arrivals_last_total"] == [1.0]
    assert one.record["blamed_seconds_total"] == [pytest.approx(2 * 0.040)]


@pytest.mark.parametrize(("coming", "waited_s"), [((C,), 0.040), ((A, C), 0.090)])
def test_waiting_in_a_streamed_round_starts_at_the_message_that_go_counts(
    one: OneRank, coming: tuple[MemberId, ...], waited_s: float
) -> None:
    """GO counts the rank from its COMING or from its STEP.

    The STEP counts if it was received before the COMING of the last rank.
    """
    one.event(ev.Coming((0,), 2, 2), after_ms=10)
    one.event(ev.Step((0,), 2, 2), after_ms=50)
    one.now_ns += 40 * MS
    bits = pack_bits(bytearray(m in coming for m in (A, B, C)))
    shares = one.share(A, 0), one.share(C, 40)
    one.round(*shares, took_ms=40, trigger="all", streamed=True, coming=bits)
    assert one.record["round_wait_seconds"] == [pytest.approx(waited_s)]


def test_late_samples_are_counted_with_their_age(one: OneRank) -> None:
    one.round(one.share(B, 0), took_ms=0)
    one.round(one.share(A, 0, fresh=False, oldest=0), one.share(B, 0), took_ms=0)
    record = one.record
    assert record["contribution_age_rounds"] == [1]
    assert (sum(record["samples_total", "fresh"]), sum(record["samples_total", "late"])) == (0, 2)
    assert record["round_wait_seconds"] == []
    assert record["participation_ratio"] == [pytest.approx(1 / 3), pytest.approx(2 / 3)]
    one.rank.facts.jumps = 1
    one.event(ev.Connected())
    assert record["jumps_total"] == [1]


def test_waiting_is_avoided_until_the_missing_rank_reports(one: OneRank) -> None:
    """GO without C at 0; A and B compute for 100 ms; C sends PENDING after 60 ms."""
    one.round(one.share(A, 0), one.share(B, 0), took_ms=0)
    one.now_ns += (100 - 6) * MS
    one.round(
        one.share(C, 0, fresh=False, oldest=0),
        one.share(A, 40),
        one.share(B, 30),
        took_ms=40,
    )
    assert one.record["wait_avoided_seconds_total"] == [pytest.approx(0.060)]
    assert one.reported_log().avoided_s == pytest.approx(0.120)


def go(round_: int, wait_ms: int, *shares: Share) -> Composition:
    record = Go(GenerationId(1, "", 1), round_, Trigger.QUORUM, shares, wait_us=wait_ms * 1000)
    return Composition(record, round_, (), [], [], [], [], ())


def share_at(member: MemberId, at_ms: int, **more: Any) -> Share:
    return Share(member=member, upto=1, count=1, offset_us=at_ms * 1000, **more)


def test_time_that_a_rank_waits_itself_is_not_counted_as_avoided() -> None:
    """B arrives at 30 ms and waits for GO at 100 ms (a hard quorum), so it saved only 30 ms."""
    avoided = AvoidedWaiting(A)
    first = go(0, 0, share_at(A, 0, fresh=True), share_at(B, 0, fresh=True))
    assert avoided.started(first, (A, B, C), 0) == (0, 0)
    later = go(1, 70, share_at(A, 70, fresh=True), share_at(B, 0, fresh=True))
    assert avoided.started(later, (A, B, C), 100 * MS) == (100 * MS, 130 * MS)


def test_a_missing_rank_would_have_waited_for_one_that_is_later_still() -> None:
    avoided = AvoidedWaiting(A)
    avoided.started(go(0, 0, share_at(A, 0, fresh=True)), (A, B, C), 0)
    later = go(1, 80, share_at(B, 0), share_at(C, 50), share_at(A, 80, fresh=True))
    assert avoided.started(later, (A, B, C), 100 * MS) == (70 * MS, 120 * MS)


def test_waiting_that_go_does_not_report_is_not_counted_as_avoided() -> None:
    """C was late and is fresh again: GO does not say when its late batch arrived."""
    avoided = AvoidedWaiting(A)
    avoided.started(go(0, 0, share_at(A, 0, fresh=True)), (A, C), 0)
    later = go(1, 20, share_at(A, 0, fresh=True), share_at(C, 20, fresh=True))
    assert avoided.started(later, (A, C), 100 * MS) == (0, 0)
    avoided.started(go(2, 0, share_at(A, 0, fresh=True)), (A, C), 200 * MS)
    avoided.reset()
    assert avoided.started(go(3, 0, share_at(A, 0, fresh=True)), (A,), 300 * MS) == (0, 0)


def test_full_rounds_with_an_idle_rank_avoid_no_waiting() -> None:
    avoided = AvoidedWaiting(A)
    full = go(
        0, 50, share_at(A, 0, fresh=True), share_at(B, 50, fresh=True), share_at(C, 0, idle=True)
    )
    avoided.started(full, (A, B, C), 0)
    assert avoided.started(full, (A, B, C), 100 * MS) == (0, 0)


def test_the_phases_of_a_membership_change_add_up_to_its_duration(one: OneRank) -> None:
    one.round(one.share(A, 0), one.share(B, 0), took_ms=0)
    one.now_ns += 200 * MS
    one.generation(A, C, D, left=(LeftOut(B, "dead"),))  # promise +10, COMMIT +10, started +10
    one.now_ns += 40 * MS
    one.round(one.share(A, 0), took_ms=0)
    record = one.record
    parts = {"detect": 0.210, "prepare": 0.010, "wire": 0.010, "resume": 0.046}
    for phase, seconds in parts.items():
        assert record["resize_phase_seconds_total", phase] == [pytest.approx(seconds)]
    assert record["resize_duration_seconds"] == [pytest.approx(sum(parts.values()))]
    assert record["generations_total"] == [1, 1]
    assert record["joined_total"] == [1]
    assert record["left_total", "dead"] == [1]
    assert record["generation_number"][-1] == 2
    assert record["incarnation_number"][-1] == 2
    assert record["rank_index"][-1] == 0
    assert record["world_size_ranks", "members"][-1] == 3
    assert sum(record["samples_redealt_total"]) == 4, "both leases of B"


def test_benched_ranks_and_their_samples_are_counted(one: OneRank) -> None:
    held = one.rank.log.held(A)
    one.round(one.share(B, 0), took_ms=0, trigger="bench", benched=(Benched(A, held),))
    assert one.record["benched_total"] == [1]
    assert one.record["world_size_ranks", "active"][-1] == 2
    assert sum(one.record["samples_redealt_total"]) == 2 * len(held)


def test_the_parts_of_the_loop_time_are_recorded() -> None:
    record = SpyRecord()
    loop = LoopMetrics(record)  # type: ignore[arg-type]
    loop.began(100 * MS)
    loop.waited(110 * MS, 150 * MS)
    loop.stepped(170 * MS, 190 * MS, fresh=True, version=1, samples=32)
    loop.began(500 * MS)  # an evaluation ran in between
    loop.stepped(510 * MS, 515 * MS, fresh=False, version=2, samples=32)
    assert record["step_duration_seconds"] == [pytest.approx(0.090), pytest.approx(0.015)]
    assert record["compute_seconds_total"] == [pytest.approx(0.030), pytest.approx(0.010)]
    assert record["exposed_seconds_total"] == [pytest.approx(0.020), pytest.approx(0.005)]
    assert record["data_wait_seconds_total"] == [pytest.approx(0.040)]
    assert record["steps_total", "fresh"] == record["steps_total", "late"] == [1.0]
    record.real.close()


def test_shadow_mode_reports_what_other_modes_would_save(one: OneRank) -> None:
    """Counting starts at the rank's second round in Shadow mode."""
    log = one.rank.log
    log.settings = replace(log.settings, mode=Mode.SHADOW, quorum=2, grace_ns=0)
    for _ in range(3):
        one.round(one.share(A, 0), one.share(B, 10), one.share(C, 40), took_ms=40, trigger="all")
    assert one.record["shadow_waited_seconds_total"] == [pytest.approx(0.070)] * 2
    assert one.record["shadow_saved_seconds_total", "Quorum"] == [pytest.approx(0.060)] * 2
    assert one.record["shadow_saved_seconds_total", "Solo"] == [pytest.approx(0.070)] * 2
    assert one.record["shadow_late_gradients_total", "Quorum"] == [1, 1]
    assert one.record["shadow_late_gradients_total", "Solo"] == [2, 2]
    shadow = one.reported_log().shadow
    assert shadow is not None
    assert (shadow.rounds, shadow.fresh) == (3, 9)
    assert shadow.late["Solo"] == 4, "the first round is Full anyhow"
    assert shadow.waited_s == pytest.approx(0.210)
    assert shadow.saved_s["Majority"] == pytest.approx(0.120)


def test_the_remaining_time_follows_the_current_speed(one: OneRank) -> None:
    """The epoch has 1000 samples, of which 4 are applied per second."""

    def left_s() -> float | None:
        one.metrics.refresh(one.rank, one.now_ns)
        return one.reported_log().left_s

    assert left_s() is None, "nothing has moved yet"
    for second in range(1, 11):
        one.now_ns += 994 * MS
        one.round(one.share(A, 0), one.share(B, 0), took_ms=0)
        assert (left_s() is None) is (second < 2), "a moment says nothing"
    assert left_s() == pytest.approx((1000 - 40) / 4, rel=0.01)
    for _ in range(150):  # the job continues at half the speed
        one.now_ns += 1994 * MS
        one.round(one.share(A, 0), one.share(B, 0), took_ms=0)
        now = left_s()
    assert now == pytest.approx((1000 - 640) / 2, rel=0.01), "the present speed"
    one.rank.log = Log.restore(one.rank.log.snapshot())
    one.now_ns += 200 * MS
    assert left_s() is None, "a donor's log is further, and no time has passed"


def test_script_metrics_cover_the_last_rounds(one: OneRank) -> None:
    """The reported metric is a mean over the last rounds only.

    It used to cover all rounds, so an early loss, or that of a previous run, stayed in it.
    """

    def loss(value: float) -> Share:
        return replace(one.share(A, 0), metrics=(LoggedMetric("loss", 4 * value, 4.0),))

    reported = one.reported_log
    assert reported().metrics == {}
    one.round(loss(8.0), took_ms=0)
    assert reported().metrics == {"loss": 8.0}
    for _ in range(METRIC_ROUNDS - 1):
        one.round(loss(1.0), took_ms=0)
    assert reported().metrics == {"loss": (8.0 + METRIC_ROUNDS - 1) / METRIC_ROUNDS}
    one.round(loss(1.0), took_ms=0)
    assert reported().metrics == {"loss": 1.0}
    assert reported().metric_sums == {
        "loss": (4.0 * (8 + METRIC_ROUNDS), 4.0 * (METRIC_ROUNDS + 1))
    }
    one.rank.log = Log.restore(one.rank.log.snapshot())  # as from a checkpoint or donor
    one.round(loss(0.5), took_ms=0)
    assert reported().metrics == {"loss": 0.5}


def test_progress_reaches_one_when_samples_are_left_out(one: OneRank) -> None:
    one.rank.log.plan = replace(PLAN, samples=5, drop_last=True)
    for share in (A, B):
        one.round(one.share(share, 0), took_ms=0)
    log = one.reported_log()
    assert (log.samples_left_out, log.progress) == (1, 1.0)


def test_participation_shares_follow_the_log(one: OneRank) -> None:
    """Shares are read from the ledger now and then, also across changes of the membership."""

    def shares() -> dict[str, float | None]:
        return dict(one.reported_log().shares)

    one.round(one.share(A, 0), one.share(B, 0), took_ms=0)
    one.round(one.share(A, 0), one.share(C, 0), took_ms=0)
    assert shares() == {"0.0#0": 1.0, "1.0#0": 0.5, "2.0#0": 0.5}
    one.round(one.share(A, 0), one.share(C, 0), took_ms=0)
    one.generation(A, C, left=(LeftOut(B, "dead"),))
    one.round(one.share(A, 0), took_ms=0)
    assert shares() == {"0.0#0": 1.0, "2.0#0": 0.5}
    one.rank.log = Log.restore(one.rank.log.snapshot())  # as from a donor
    one.round(one.share(C, 0), took_ms=0)
    assert shares() == {"0.0#0": 0.8, "2.0#0": 0.6}


def test_streamed_and_aborted_rounds_failures_and_copies_are_counted(one: OneRank) -> None:
    """These events are not visible in a GO."""
    record = one.record
    one.round(one.share(A, 0), one.share(B, 0), took_ms=0)
    assert record["round_duration_seconds"] == [], "it counts from the round before"
    assert record["update_seconds_total"] == [pytest.approx(0.001)]
    assert record["weight_copies_total"] == [1]
    assert record["weight_copy_seconds_total"] == [pytest.approx(0.001)]
    one.now_ns += 90 * MS
    one.round(one.share(A, 0), took_ms=0)
    assert record["round_duration_seconds"] == [pytest.approx(0.096)]
    one.metrics.streamed(hidden_ns=3 * MS)
    assert record["rounds_streamed_total"] == [1]
    assert record["transfer_hidden_seconds_total"] == [pytest.approx(0.003)]
    one.metrics.voided(GivenUp.LATE)
    assert record["rounds_given_up_total", "late"] == [1]
    one.metrics.failed(RING)
    assert record["transport_errors_total", "mpi"] == [1]


def test_the_reporting_rank_exports_the_progress_of_the_job(one: OneRank) -> None:
    for _ in range(20):
        one.now_ns += 994 * MS
        one.round(one.share(A, 0), one.share(B, 0), took_ms=0)
        one.metrics.refresh(one.rank, one.now_ns)
    assert one.record["progress_ratio"][-1] == pytest.approx(80 / 1000)
    assert one.record["epoch_number"][-1] == pytest.approx(80 / 1000)
    assert one.record["remaining_seconds"][-1] == pytest.approx((1000 - 80) / 4, rel=0.01)


def test_checkpoints_are_counted_by_result(one: OneRank) -> None:
    saving = Saving(every=2, written=3, skipped=1, failed=2, published=6)
    CheckpointMetrics(one.record).follow(saving, exposed_s=0.5, hidden_s=4.0)  # type: ignore[arg-type]
    record = one.record
    results = {name: record["checkpoints_total", name] for name in ("written", "failed", "skipped")}
    assert results == {"written": [3], "failed": [2], "skipped": [1]}
    assert record["checkpoint_rounds"] == [6]
    assert record["checkpoint_exposed_seconds_total"] == [0.5]
    assert record["checkpoint_hidden_seconds_total"] == [4.0]


def test_every_metric_of_a_rank_is_written(one: OneRank) -> None:
    """A metric in the catalog that no code writes would be a false promise."""
    one.event(ev.Step((0,), 2, 2))
    drop = Drop(DropReason.NONFINITE, 2, one.rank.log.held(A)[1:2])
    one.round(one.share(A, 9, drops=(drop,)), one.share(B, 0), took_ms=9)
    one.round(one.share(C, 0, fresh=False), one.share(A, 0), took_ms=0)
    one.rank.log.ledger.metrics["loss"] = (6.0, 4.0)
    for _ in range(10):  # a single moment gives no remaining time
        one.now_ns += 1000 * MS
        one.round(one.share(B, 0), took_ms=0)
        one.metrics.refresh(one.rank, one.now_ns)
    assert one.record["figure_number", "0"][-1] == 6.0
    one.rank.log.settings = replace(one.rank.log.settings, mode=Mode.SHADOW)
    for _ in range(2):
        one.round(one.share(A, 0), took_ms=0)
    one.metrics.failed(RING)
    one.metrics.streamed(hidden_ns=10**6)
    one.metrics.voided(GivenUp.LATE)
    one.rank.facts.jumps = 1
    one.generation(A, B, D, left=(LeftOut(C, "silent"),))
    held = one.rank.log.held(A)
    one.round(one.share(B, 0), took_ms=0, trigger="bench", benched=(Benched(A, held),))
    loop = LoopMetrics(one.record)  # type: ignore[arg-type]
    loop.began(0)
    loop.waited(0, 1)
    loop.stepped(1, 2, fresh=True, version=1, samples=32)
    saving = Saving(every=2, written=3, skipped=1, failed=2, published=6)
    CheckpointMetrics(one.record).follow(saving, exposed_s=0.5, hidden_s=4.0)  # type: ignore[arg-type]
    assert one.record["checkpoints_total", "skipped"] == [1]
    refuse(Entry.PEERS, RefusalReason.MALFORMED, "a test")
    one.metrics.refresh(one.rank, one.now_ns)
    written = {name for name, *_ in (key for key, values in one.record.written.items() if values)}
    ours = {metric.name for metric in CATALOG if metric.writer is not Writer.AGENT}
    assert written == ours
    assert one.record["samples_dropped_total", "nonfinite"] == [2]


def test_a_rank_reports_some_metrics_to_the_coordinator_as_well(one: OneRank) -> None:
    """Metrics with a fact in the catalog are written once and reported from the record."""
    one.metrics.opened([RING, RING, Method("gloo", "native")], [0.0] * 3, [])
    one.metrics.voided(GivenUp.LATE)
    one.metrics.voided(GivenUp.LATE)
    saving = Saving(every=2, written=3, failed=2, published=6)
    CheckpointMetrics(one.record).follow(saving, exposed_s=0.5, hidden_s=4.0)  # type: ignore[arg-type]
    facts = one.metrics.last_figures(one.rank).facts
    assert {name: value for name, value in facts.items() if not name.startswith("log.")} == {
        Fact.LAG_S: 0.0,
        Fact.WAIT_S: 0.0,
        Fact.EPOCH: 0.0,
        Fact.CARRIED + "mpi": 2.0,
        Fact.CARRIED + "gloo": 1.0,
        Fact.GIVEN_UP + GivenUp.LATE: 2.0,
        Fact.SAVED: 3.0,
        Fact.SAVE_FAILED: 2.0,
        Fact.SAVED_VERSION: 6.0,
        Fact.SAVE_EXPOSED_S: 0.5,
        Fact.SAVE_HIDDEN_S: 4.0,
    }


def test_refusals_are_counted_once_by_entry_point_and_reason(one: OneRank) -> None:
    one.metrics.refresh(one.rank, one.now_ns)  # flush what other tests of this process have counted
    key = "refused_total", Entry.RENDEZVOUS, RefusalReason.OTHER_USER
    before = PROCESS.counts().get(key[1:], 0)
    for _ in range(3):
        refuse(Entry.RENDEZVOUS, RefusalReason.OTHER_USER, "a test")
    for _ in range(2):
        one.metrics.refresh(one.rank, one.now_ns)
    assert one.record[key] == [before + 3]
