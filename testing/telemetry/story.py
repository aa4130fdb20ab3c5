"""The story of a run as Prometheus would have scraped it, produced by the code of agents.

Each pod has its real records and its real page. What the ranks write into them is made up: one step
a second, one rank late by the same time in each step, one killed and replaced, one that joins, one
gradient that is not finite. So a job may have any number of ranks, any mode and any scrape
interval, and fifteen minutes of it take seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from paceline.core.agent.supervise import PlacePhase
from paceline.core.protocol.shadow import PARTIAL
from paceline.telemetry.catalog import CATALOG, FIGURE, LABELS, Metric, MetricKind, Writer
from paceline.telemetry.collector import PodRecords
from paceline.telemetry.records import RankRecord
from paceline.worker.metrics.job import JobMetrics
from paceline_api.ids import MemberId
from paceline_api.status import LogStatus
from paceline_api.types.enums import Mode

from testing.telemetry import known

BEGAN_S = 1_700_000_000 - 1_700_000_000 % 60
LASTS_S = 900
TICK_S = 5
SLOW, KILLED = 2, 1
KILLED_S, REPLACED_S, NOT_FINITE_S, JOINS_S = 300, 330, 400, 500
LATE_S = 0.3
"""Delay of the slow rank behind each other one, in each round of a second."""
TRIGGERS = {
    Mode.FULL: "all",
    Mode.SHADOW: "all",
    Mode.QUORUM: "quorum",
    Mode.MAJORITY: "quorum",
    Mode.SOLO: "initiator",
    Mode.DEADLINE: "deadline",
}
SECONDS = {
    "paceline_compute_seconds_total": 0.6,
    "paceline_exposed_seconds_total": 0.05,
    "paceline_data_wait_seconds_total": 0.01,
    "paceline_blamed_seconds_total": 0.002,
    "paceline_round_wait_seconds": 0.02,
    "paceline_round_transfer_seconds": 0.03,
    "paceline_round_duration_seconds": 1.0,
    "paceline_step_duration_seconds": 1.0,
    "paceline_arrival_lag_seconds": 0.01,
    "paceline_participation_ratio": 0.9,
    "paceline_contribution_age_rounds": 0.0,
}
"""Value per step; metrics that are not listed have 0.01."""
MS = 10**6
SEGMENTS = (1 << 20, 25 << 20)
ANNOUNCED_MS = 650
REDUCED_MS = ((910, 930), (950, 980))
"""Beginning and end of each segment's sum. The first one overlaps the slow rank's backward pass."""
UPDATED_MS = (980, 990)
"""Beginning and end of the update within each second, which is a step."""
AFTER_A_LOSS = ("paceline_left_total", "paceline_resize_duration_seconds", "paceline_resize_phase")
AFTER_A_JOIN = ("paceline_joined_total",)
RARE = ("paceline_benched_total", "paceline_rounds_given_up_total", "paceline_transport_errors")


@dataclass
class Pod:
    """A pod with its real records and one rank."""

    slot: int
    name: str
    began_s: int
    records: PodRecords = field(init=False)
    record: RankRecord = field(init=False)

    def __post_init__(self) -> None:
        self.records = PodRecords(self.slot, 1)
        self.record = RankRecord.open(os.dup(self.records.begin(MemberId(self.slot, 0, 0))))
        self.records.connection = lambda: (True, 1)
        self.records.phases = lambda: [PlacePhase.RUNNING]
        self.records.carriers = lambda: {MemberId(self.slot, 0, 0): "TCP"}
        self.record.rounds.divide(SEGMENTS)
        self.job = JobMetrics(self.record)

    def target(self, namespace: str, job: str) -> dict[str, str]:
        """Return the labels that the scrape adds."""
        return {
            "namespace": namespace,
            known.JOB: job,
            "pod": self.name,
            "node": f"node-{self.slot % 4}",
            "job": f"{namespace}/workers",
            "instance": f"{self.name}:9464",
        }


@dataclass(frozen=True)
class Run:
    """Parameters of a run."""

    namespace: str
    job: str
    ranks: int
    mode: Mode
    scrape_s: int
    lasts_s: int = LASTS_S


def lines(run: Run) -> Iterator[str]:
    """Yield the samples in OpenMetrics's notation, each with its time."""
    pods = {slot: Pod(slot, f"{run.job}-{slot}-1", 0) for slot in range(run.ranks)}
    for at_s in range(0, run.lasts_s + 1, TICK_S):
        if at_s == KILLED_S:
            pods.pop(KILLED).records.close()
        if at_s == REPLACED_S:
            pods[KILLED] = Pod(KILLED, f"{run.job}-{KILLED}-2", at_s)
        if at_s == JOINS_S:
            pods[run.ranks] = Pod(run.ranks, f"{run.job}-{run.ranks}-1", at_s)
        for pod in pods.values():
            _tick(run, pod, at_s, members=len(pods))
            if at_s % run.scrape_s == 0:
                yield from _page(run, pod, at_s)
        if at_s % run.scrape_s == 0:
            yield from _others(run, at_s)
    for pod in pods.values():
        pod.records.close()


def _tick(run: Run, pod: Pod, at_s: int, members: int) -> None:
    """Write what a rank records in TICK_S; at the pod's beginning only that the rank exists."""
    slow = pod.slot == SLOW
    steps = TICK_S if at_s > pod.began_s else 0
    for second in range(at_s - steps, at_s):
        _sample(pod, second, late_ms=int(LATE_S * 1000))
    for metric in CATALOG:
        if metric.writer is Writer.AGENT or metric.labels == (FIGURE,):
            continue
        for labels in _children(run.mode, metric):
            value = SECONDS.get(metric.name, 0.01) * (1 + 0.01 * (pod.slot % 7))
            if metric.name == "paceline_blamed_seconds_total" and slow:
                value = LATE_S * (members - 1)
            if metric.name in ("paceline_arrival_lag_seconds", "paceline_compute_seconds_total"):
                value += LATE_S * slow
            if not metric.name.endswith(("seconds_total", "_bytes_total")):
                value = max(value, 1.0) if metric.kind is MetricKind.COUNTER else value
            if not _happened(metric.name, labels, at_s, pod):
                continue
            match metric.kind:
                case MetricKind.HISTOGRAM:
                    histogram = pod.record.histogram(metric.name, **labels)
                    for _ in range(steps):
                        histogram.observe(value)
                case MetricKind.COUNTER:
                    rare = metric.name.startswith((*AFTER_A_LOSS, *AFTER_A_JOIN, *RARE))
                    once = rare or "reason" in labels
                    when = JOINS_S if metric.name.startswith(AFTER_A_JOIN) else KILLED_S
                    counter = pod.record.counter(metric.name, **labels)
                    counter.add(float(at_s == when) if once else value * steps)
                case MetricKind.GAUGE:
                    if not metric.name.startswith(("paceline_progress", "paceline_remaining")):
                        number = _number(metric.name, at_s, members)
                        pod.record.gauge(metric.name, **labels).set(number)
    if pod.slot == 0:
        share = at_s / run.lasts_s
        weight = float(at_s * members)
        sums = {"loss": (weight * 2.0, weight), "accuracy": (weight * 0.5, weight)}
        log = LogStatus(progress=share, left_s=run.lasts_s - at_s, metric_sums=sums)
        pod.job.export(log, epoch=3 * share)


def _sample(pod: Pod, second: int, late_ms: int) -> None:
    """Record one step and its round, as the rank's threads do."""
    began, slow = (BEGAN_S + second) * 1000 * MS, pod.slot == SLOW
    announced = began + (ANNOUNCED_MS + late_ms * slow) * MS
    last = began + (ANNOUNCED_MS + late_ms) * MS
    pod.record.rounds.begin(second, last, streamed=True)
    pod.record.rounds.arrived(announced)
    for number, (from_ms, to_ms) in enumerate(REDUCED_MS):
        pod.record.rounds.opened(number, began + from_ms * MS)
        pod.record.rounds.carried(began + from_ms * MS, began + to_ms * MS)
    update = (began + at_ms * MS for at_ms in UPDATED_MS)
    pod.record.rounds.end(MemberId(SLOW, 0, 0), last, *update)
    pod.record.steps.write(
        began_ns=began,
        announced_ns=announced,
        resumed_ns=began + 1000 * MS,
        spent_ns=(0, 10 * MS, 200 * MS, 400 * MS),
        lease_ns=5 * MS,
        version=second + 1,
        fresh=True,
        samples=32,
    )


def _happened(name: str, labels: dict[str, str], at_s: int, pod: Pod) -> bool:
    if labels.get("reason"):
        return labels["reason"] == "nonfinite" and pod.slot == SLOW and at_s >= NOT_FINITE_S
    if labels.get("why", "dead") != "dead" or name.startswith(RARE):
        return False
    if name.startswith(AFTER_A_LOSS):
        return at_s >= KILLED_S and pod.began_s < KILLED_S
    return not name.startswith(AFTER_A_JOIN) or at_s >= REPLACED_S


def _number(name: str, at_s: int, members: int) -> float:
    match name:
        case "paceline_committed_rounds":
            return float(at_s)
        case "paceline_checkpoint_rounds":
            return float(at_s - at_s % 60)
        case "paceline_world_size_ranks":
            return float(members)
        case "paceline_generation_number":
            return 1.0 + sum(at_s >= when for when in (KILLED_S, REPLACED_S, JOINS_S))
    return 1.0


def _children(mode: Mode, metric: Metric) -> Iterator[dict[str, str]]:
    """Yield the label values of a metric for a job in this mode, over one transport."""
    shadow = metric.name.startswith("paceline_shadow")
    if shadow and mode is not Mode.SHADOW:
        return
    one: dict[str, tuple[str, ...]] = {
        "transport": ("mpi",),
        "algorithm": ("ring",),
        "trigger": (TRIGGERS[mode],),
    }
    one |= {"wire": ("Float32",), "bits": ("order",)}
    one["mode"] = tuple(PARTIAL) if shadow else (mode,)
    for values in product(*(one.get(label, LABELS[label]) for label in metric.labels)):
        yield dict(zip(metric.labels, map(str, values), strict=True))


def _page(run: Run, pod: Pod, at_s: int) -> Iterator[str]:
    target = pod.target(run.namespace, run.job)
    for family in pod.records.collect():
        for sample in family.samples:
            yield _line(sample.name, target | sample.labels, sample.value, at_s)
    memory = {"container": "trainer"} | target
    yield _line("container_memory_working_set_bytes", memory, 1e9, at_s)


def _others(run: Run, at_s: int) -> Iterator[str]:
    """Yield the series of the operator and those that the rules derive."""
    job = {"namespace": run.namespace, known.JOB: run.job}
    yield _line("job:paceline_active_ranks:max", job, run.ranks, at_s)
    if at_s >= KILLED_S:
        alert = {"alertname": "PacelineStraggler", "alertstate": "firing", "severity": "warning"}
        yield _line("ALERTS", {**job, **alert, "worker": f"{SLOW}.0"}, 1, at_s)
    for name, series in known.of_operator().items():
        for values in product(*series.labels.values()):
            labels = dict(series.target) | dict(zip(series.labels, values, strict=True))
            labels |= {"instance": f"{run.namespace}-{run.job}", "namespace": run.namespace}
            yield _line(name, labels, at_s if series.kind == "counter" else 1, at_s)


def _line(name: str, labels: dict[str, str], value: float, at_s: int) -> str:
    text = ",".join(f'{label}="{of}"' for label, of in labels.items())
    return f"{name}{{{text}}} {value} {BEGAN_S + at_s}\n"
