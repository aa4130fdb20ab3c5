"""Metrics of a rank in shared memory: cheap to write, consistent to read, kept after its death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from paceline.core.agent.supervise import PlacePhase
from paceline.core.anatomy.samples import FIGURES_MAX
from paceline.telemetry.catalog import CATALOG, MetricKind
from paceline.telemetry.collector import PodRecords
from paceline.telemetry.records import (
    BYTES,
    HEADER_SLOTS,
    LAYOUT,
    NAME_SLOTS,
    RankRecord,
    RecordError,
    RecordReader,
    allocate_record,
    width,
)
from paceline.worker.metrics.job import JobMetrics
from paceline_api.ids import MemberId
from paceline_api.status import LogStatus
from paceline_api.types.enums import Network
from prometheus_client.parser import text_string_to_metric_families

FIRST, SECOND = MemberId(3, 0, 1000), MemberId(3, 0, 1001)
STEP_S = 20e-6
"""What recording the metrics of one step may take: 0.1 % of a 20 ms step (docs/design/metrics.md).
"""


@pytest.fixture
def pod() -> Iterator[PodRecords]:
    records = PodRecords(3, 1)
    yield records
    records.close()


def open_for(pod: PodRecords, member: MemberId) -> RankRecord:
    return RankRecord.open(os.dup(pod.begin(member)))


def page(pod: PodRecords) -> dict[str, float]:
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(pod.page().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


def test_slots_of_metrics_do_not_overlap() -> None:
    taken = set(LAYOUT.seq.values())
    for (name, _), at in LAYOUT.first.items():
        metric = next(metric for metric in CATALOG if metric.name == name)
        slots = set(range(at, at + width(metric)))
        assert not slots & taken, name
        taken |= slots
    assert taken == set(range(HEADER_SLOTS, LAYOUT.names))
    assert LAYOUT.slots - LAYOUT.names == FIGURES_MAX * NAME_SLOTS


def test_only_metrics_that_were_touched_are_exported(pod: PodRecords) -> None:
    record = open_for(pod, FIRST)
    assert not [name for name in page(pod) if name.startswith("paceline_steps")]
    record.counter("paceline_steps_total", kind="late")
    generation = record.gauge("paceline_generation_number")
    shown = page(pod)
    assert shown["paceline_steps_total{kind=late,worker=3.0}"] == 0
    assert "paceline_steps_total{kind=fresh,worker=3.0}" not in shown
    assert "paceline_generation_number{worker=3.0}" not in shown
    generation.set(7)
    assert page(pod)["paceline_generation_number{worker=3.0}"] == 7
    generation.clear()
    assert "paceline_generation_number{worker=3.0}" not in page(pod)


def test_histograms_are_cumulative(pod: PodRecords) -> None:
    ratio = open_for(pod, FIRST).histogram("paceline_participation_ratio")
    for value in (0.1, 0.5, 0.75, 0.76, 1.0):
        ratio.observe(value)
    shown = page(pod)

    def below(bound: str) -> float:
        return shown[f"paceline_participation_ratio_bucket{{le={bound},worker=3.0}}"]

    assert [below(b) for b in ("0.1", "0.4", "0.5", "0.75", "0.85", "0.999", "+Inf")] == [
        1, 1, 2, 3, 4, 4, 5
    ]  # fmt: skip
    assert shown["paceline_participation_ratio_count{worker=3.0}"] == 5
    assert shown["paceline_participation_ratio_sum{worker=3.0}"] == pytest.approx(3.11)


def test_counters_never_go_backwards_across_restarts(pod: PodRecords) -> None:
    record = open_for(pod, FIRST)
    record.counter("paceline_jumps_total").add(3)
    record.histogram("paceline_arrival_lag_seconds").observe(0.5)
    record.gauge("paceline_rank_index").set(1)
    pod.retire(FIRST)
    pod.retire(FIRST)
    while_dead = page(pod)
    assert while_dead["paceline_jumps_total{worker=3.0}"] == 3
    assert "paceline_rank_index{worker=3.0}" not in while_dead
    again = open_for(pod, SECOND)
    assert page(pod)["paceline_jumps_total{worker=3.0}"] == 3
    again.counter("paceline_jumps_total").add(2)
    again.histogram("paceline_arrival_lag_seconds").observe(0.5)
    shown = page(pod)
    assert shown["paceline_jumps_total{worker=3.0}"] == 5
    assert shown["paceline_arrival_lag_seconds_count{worker=3.0}"] == 2
    assert shown["paceline_rank_restarts_total{worker=3.0}"] == 1


def test_the_page_shows_what_the_agent_itself_measures(pod: PodRecords) -> None:
    away = page(pod)
    assert not [name for name in away if "coordinator" in name or "state_info" in name]
    pod.phases = lambda: [PlacePhase.RUNNING]
    pod.connection = lambda: (False, 3)
    pod.carriers = lambda: {FIRST: Network.TCP}
    open_for(pod, FIRST).close()
    open_for(pod, SECOND).close()
    shown = page(pod)
    assert shown["paceline_rank_state_info{state=running,worker=3.0}"] == 1
    assert shown["paceline_coordinator_connected_info{}"] == 0
    assert shown["paceline_coordinator_connections_total{}"] == 3
    assert shown["paceline_transport_carrier_info{carrier=TCP,worker=3.0}"] == 1
    assert shown["paceline_rank_restarts_total{worker=3.0}"] == 1
    assert away["paceline_scrape_seconds_total{}"] < shown["paceline_scrape_seconds_total{}"] < 60


@pytest.mark.long
def test_the_last_values_of_a_killed_rank_are_kept(pod: PodRecords) -> None:
    fd = pod.begin(FIRST)
    script = (
        "import os\n"
        "from paceline.telemetry.records import RankRecord\n"
        f"record = RankRecord.open({fd})\n"
        "counter = record.counter('paceline_jumps_total')\n"
        "for _ in range(1000): counter.add()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], pass_fds=[fd], timeout=30, check=False)
    assert page(pod)["paceline_jumps_total{worker=3.0}"] == 1000


WRITER = """
import sys, time
from paceline.telemetry.records import RankRecord
age = RankRecord.open(int(sys.argv[1])).histogram("paceline_contribution_age_rounds")
print("ready", flush=True)
while True:
    for _ in range(20):
        age.observe(1.0)
    time.sleep(0.00002)
"""


@pytest.mark.long
def test_a_reader_never_sees_a_partial_update() -> None:
    """Every update adds 1 to one bucket and 1 to the sum, so a torn read would differ.

    Where the kernel stops the writer inside an update, no reader waits for it: one figure is then
    behind by that update. On a busy machine this happens a few times in thousands of reads.
    """
    fd = allocate_record()
    reader = RecordReader(fd)
    at = LAYOUT.first["paceline_contribution_age_rounds", ()]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        try:
            states: set[float] = set()
            behind = 0
            until_s = time.monotonic() + 60.0
            while len(states) < 1000:  # until 1000 different states of the record were read
                values = reader.read().values
                ahead = sum(values[at : at + 11]) - values[at + 11]
                behind += ahead != 0.0
                assert ahead in (0.0, 1.0)
                assert behind <= 5
                states.add(values[at + 11])
                assert time.monotonic() < until_s, len(states)
        finally:
            writer.kill()
    os.close(fd)


def test_a_writer_killed_inside_an_update_does_not_block_readers() -> None:
    fd = allocate_record()
    record, reader = RankRecord.open(os.dup(fd)), RecordReader(fd)
    os.close(fd)
    age = record.histogram("paceline_contribution_age_rounds")
    age.observe(2.0)
    age._words[age._seq] += 1
    assert reader.read().values[age._sum] == 2.0
    reader.close()


def test_a_record_of_another_version_is_refused() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 64)
    with pytest.raises(RecordError, match="64 bytes"):
        RankRecord.open(fd)
    fd = os.memfd_create("test")
    os.ftruncate(fd, BYTES)
    with pytest.raises(RecordError, match="another version"):
        RankRecord.open(fd)


def test_unknown_metrics_and_labels_raise() -> None:
    record = RankRecord.create()
    with pytest.raises(KeyError):
        record.counter("paceline_typo_total")
    with pytest.raises(KeyError):
        record.counter("paceline_steps_total", kind="typo")
    with pytest.raises(AssertionError, match="is a counter"):
        record.gauge("paceline_jumps_total")
    with pytest.raises(AssertionError, match="labels"):
        record.counter("paceline_steps_total")
    record.close()


def test_every_metric_is_exported_with_its_value_and_labels(pod: PodRecords) -> None:
    record = open_for(pod, FIRST)
    written: dict[str, float] = {}
    for number in range(FIGURES_MAX):
        record.name_figure(number, str(number))
    for metric in CATALOG:
        if metric.writer == "agent":
            continue
        for child in metric.children():
            labels = dict(zip(metric.labels, child, strict=True))
            value = len(written) + 0.5  # a different value for each, so that a mix-up shows
            name = metric.name
            match metric.kind:
                case MetricKind.COUNTER:
                    record.counter(name, **labels).add(value)
                case MetricKind.GAUGE:
                    record.gauge(name, **labels).set(value)
                case MetricKind.HISTOGRAM:
                    record.histogram(name, **labels).observe(value)
                    name += "_sum"
            pairs = ",".join(f"{k}={v}" for k, v in sorted({**labels, "worker": "3.0"}.items()))
            written[f"{name}{{{pairs}}}"] = value
    shown = page(pod)
    assert len(written) > 100
    assert {name: shown.get(name) for name in written} == written


def test_script_metrics_keep_their_names_within_limits(pod: PodRecords) -> None:
    """Scripts choose the names: too many, too long, and equal after truncation."""
    record = open_for(pod, FIRST)
    job, long = JobMetrics(record), "näme " * 10
    sums = {"loss": (6.0, 4.0), 'a"b': (-1.0, 2.0), long: (1.0, 1.0)}
    job.export(LogStatus(progress=0.25, metric_sums=sums), epoch=None)
    shown = page(pod)
    assert shown["paceline_progress_ratio{worker=3.0}"] == 0.25
    assert "paceline_remaining_seconds{worker=3.0}" not in shown
    assert shown["paceline_figure_number{figure=loss,worker=3.0}"] == 6
    assert shown["paceline_figure_weight_number{figure=loss,worker=3.0}"] == 4
    assert shown['paceline_figure_number{figure=a"b,worker=3.0}'] == -1
    (cut,) = (name for name in shown if "figure_number{figure=n" in name)
    assert long.startswith(cut.split("=")[1].split(",")[0])
    more = {f"more {n}": (1.0, 1.0) for n in range(50)} | {long + "!": (2.0, 1.0)}
    job.export(LogStatus(metric_sums=more), epoch=None)
    assert len([name for name in page(pod) if "paceline_figure_number" in name]) == FIGURES_MAX
    job.clear()
    assert not [name for name in page(pod) if "_figure_" in name or "_progress_" in name]
    record.close()


def test_recording_the_metrics_of_a_step_is_cheap() -> None:
    """Time the 25 updates that both threads write in one usual step and round.

    The bound is three times the budget, because the machine is noisy; `-s` shows the measured time.
    """
    record = RankRecord.create()
    counters = [
        record.counter(name)
        for name in (
            "paceline_compute_seconds_total",
            "paceline_exposed_seconds_total",
            "paceline_weight_copies_total",
            "paceline_weight_copy_seconds_total",
            "paceline_update_seconds_total",
            "paceline_blamed_seconds_total",
            "paceline_wait_avoided_seconds_total",
            "paceline_arrivals_last_total",
        )
    ]
    counters += [
        record.counter("paceline_steps_total", kind="fresh"),
        record.counter("paceline_rounds_total", mode="Full", trigger="all"),
        record.counter("paceline_samples_total", kind="fresh"),
        record.counter("paceline_payload_bytes_total", transport="mpi", algorithm="ring"),
        record.counter("paceline_transfer_seconds_total", transport="mpi", algorithm="ring"),
    ]
    histograms = [
        record.histogram(metric.name)
        for metric in CATALOG
        if metric.kind is MetricKind.HISTOGRAM and "resize" not in metric.name
    ]
    gauges = [
        record.gauge(name) for name in ("paceline_committed_rounds", "paceline_generation_number")
    ]
    best_s = float("inf")
    for _ in range(20):
        before = time.perf_counter()
        for _ in range(100):
            for counter in counters:
                counter.add(0.01)
            for histogram in histograms:
                histogram.observe(0.02)
            for gauge in gauges:
                gauge.set(3.0)
        best_s = min(best_s, (time.perf_counter() - before) / 100)
    updates = len(counters) + len(histograms) + len(gauges)
    figure = f"{best_s * 1e6:.1f} us per step for {updates} updates; bar {STEP_S * 1e6:.0f} us"
    sys.stdout.write(figure + "\n")
    assert best_s < 3 * STEP_S
