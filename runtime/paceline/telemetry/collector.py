"""The pod's page for Prometheus: the records of its ranks, combined at each scrape.

The series of a place continue when its rank is restarted: the last values of dead ranks are added
to those of the living one, so a counter never decreases. Gauges come from the living rank alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Final

from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_S
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from paceline.clock import now_ns
from paceline.core.agent.supervise import PlacePhase
from paceline.core.anatomy.dissect import summarise
from paceline.core.anatomy.samples import RankSamples
from paceline.core.messages import DealtBatch
from paceline.refusals import PROCESS
from paceline.telemetry import anatomy
from paceline.telemetry.catalog import BY_NAME, CATALOG, FIGURE, Metric, MetricKind, Writer
from paceline.telemetry.records import LAYOUT, Reading, RecordReader, allocate_record, width

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""Content type of the page."""
OPENMETRICS_TYPE: Final = openmetrics.CONTENT_TYPE_LATEST
"""Content type of the page with exemplars."""
WORKER: Final = "worker"
"""Label of the place of a rank: slot.process."""

Values = dict[tuple[str, tuple[str, ...]], tuple[float, ...]]
"""Slots of each child that was written, by metric and label values."""


_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(slots=True)
class _Place:
    """One place of the pod: its living rank, and what is left of earlier ones."""

    fd: int | None = None
    """Descriptor of the living rank's record; None without one."""
    reader: RecordReader | None = None
    member: MemberId | None = None
    """The rank that was started here last."""
    earlier: Values = field(default_factory=dict)
    """Sums over the earlier ranks."""
    telemetry_s: float = 0.0
    """Seconds that earlier ranks spent on telemetry."""
    starts: int = 0
    """Number of ranks that were started here."""
    died: RankSamples | None = None
    """Last samples of the rank that died here last."""


class PodRecords(Collector):
    """Owns the records of a pod's ranks. All methods are called on one thread."""

    def __init__(self, slot: int, procs: int) -> None:
        self._slot = slot
        self._places = [_Place() for _ in range(procs)]
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._scrape_s = 0.0
        self.phases: Callable[[], Iterable[PlacePhase]] | None = None
        """Returns the phase of each place, in order; called at each scrape."""
        self.connection: Callable[[], tuple[bool, int]] | None = None
        """Returns whether the coordinator is connected, and the number of connections so far."""
        self.carriers: Callable[[], Mapping[MemberId, str]] | None = None
        """Returns the network that carries the data channel of each living rank, as far as it is
        known."""

    def begin(self, member: MemberId) -> int:
        """Create the record of a rank that is about to start.

        Args:
            member: The rank. A record of an earlier rank in its place is retired.

        Returns:
            The descriptor of the record, which this object owns.
        """
        place = self._places[member.local]
        self.retire(place.member)
        place.fd = allocate_record()
        place.reader = RecordReader(place.fd)
        place.member = member
        place.starts += 1
        return place.fd

    def retire(self, member: MemberId | None) -> None:
        """Keep the last values of a dead rank and close its record. A second call has no effect.

        Args:
            member: The rank; None has no effect.
        """
        if member is None:
            return
        place = self._places[member.local]
        if place.reader is None or place.fd is None or place.member != member:
            return
        reading = place.reader.read()
        place.earlier = _fold(place.earlier, _values(reading))
        place.telemetry_s += reading.observations * reading.observation_s
        place.died = _samples(place, alive=False)
        place.reader.close()
        os.close(place.fd)
        place.reader, place.fd = None, None

    def last_work(self, member: MemberId) -> tuple[DealtBatch | None, int]:
        """Return the batch that a rank worked on, and the version that its last step() returned.

        Args:
            member: The rank.

        Returns:
            (batch, version); (None, 0) if the rank was retired.
        """
        place = self._places[member.local]
        if place.reader is None or place.member != member:
            return None, 0
        steps = place.reader.steps()
        return place.reader.batch(), steps[-1].version if steps else 0

    def values(self) -> dict[MemberId, Values]:
        """Return the values of the living ranks."""
        return {
            place.member: _values(place.reader.read())
            for place in self._places
            if place.member is not None and place.reader is not None
        }

    def samples(self) -> tuple[RankSamples, ...]:
        """Return the samples of the living ranks, and of the last rank that died in each place."""
        died = [place.died for place in self._places if place.died is not None]
        return (*died, *(_samples(p, alive=True) for p in self._places if p.reader is not None))

    def page(self, *, exemplars: bool = False) -> bytes:
        """Return the page for Prometheus.

        Args:
            exemplars: True for the OpenMetrics format, with the last round of each bucket as
                exemplar.

        Returns:
            The page; its content type is CONTENT_TYPE, or OPENMETRICS_TYPE with exemplars.
        """
        before = now_ns()
        page: bytes = (openmetrics.generate_latest if exemplars else generate_latest)(
            self._registry
        )
        self._scrape_s += (now_ns() - before) / NS_PER_S
        return page

    def close(self) -> None:
        """Retire all ranks."""
        for place in self._places:
            self.retire(place.member)

    def describe(self) -> Iterable[Family]:
        """Return nothing: the names of the series are not registered in advance."""
        return ()

    def collect(self) -> Iterable[Family]:
        """Yield all families of the page; prometheus_client calls it at each scrape."""
        ranks: list[Values] = []
        shown: list[anatomy.Exemplars] = []
        telemetry_s = 0.0
        for place in self._places:
            rounds = place.reader.rounds() if place.reader is not None else ()
            shown.append(anatomy.exemplars(rounds))
            reading = place.reader.read() if place.reader is not None else None
            now = _values(reading) if reading is not None else {}
            ranks.append({**now, **_fold(place.earlier, now)})
            telemetry_s += place.telemetry_s
            if reading is not None:
                telemetry_s += reading.observations * reading.observation_s
        for metric in CATALOG:
            if metric.writer is not Writer.AGENT:
                yield self._rank_family(metric, ranks, shown)
        yield from self._anatomy_families()
        yield from self._agent_families(telemetry_s)

    def _workers(self) -> list[str]:
        """Return the value of the label `worker` of each place."""
        return [f"{self._slot}.{local}" for local in range(len(self._places))]

    def _anatomy_families(self) -> Iterable[Family]:
        families: dict[str, _Family] = {}
        for worker, place in zip(self._workers(), self._places, strict=True):
            if place.reader is None:
                continue
            summary = summarise(place.reader.steps(), place.reader.rounds())
            for name, labels, value in anatomy.gauges(summary):
                family = families.setdefault(name, _family(BY_NAME[name]))
                _add(family, BY_NAME[name], (worker, *labels), (value,), {})
        return families.values()

    def _rank_family(
        self, metric: Metric, ranks: list[Values], exemplars: list[anatomy.Exemplars]
    ) -> Family:
        family = _family(metric)
        for worker, values, shown in zip(self._workers(), ranks, exemplars, strict=True):
            for child in _children(metric, values):
                slots = values.get((metric.name, child))
                if slots is not None:
                    _add(family, metric, (worker, *child), slots, shown.get(metric.name, {}))
        return family

    def _agent_families(self, telemetry_s: float) -> Iterable[Family]:
        workers = self._workers()
        yield _of_agent("paceline_telemetry_seconds_total", [((), telemetry_s)])
        yield _of_agent("paceline_scrape_seconds_total", [((), self._scrape_s)])
        yield _of_agent("paceline_agent_refused_total", PROCESS.counts().items())
        restarts = [
            ((worker,), max(0, place.starts - 1))
            for worker, place in zip(workers, self._places, strict=True)
        ]
        yield _of_agent("paceline_rank_restarts_total", restarts)
        if self.phases is not None:
            states = [(key, 1.0) for key in zip(workers, self.phases(), strict=True)]
            yield _of_agent("paceline_rank_state_info", states)
        if self.carriers is not None:
            known = [
                ((workers[member.local], carrier), 1.0)
                for member, carrier in self.carriers().items()
                if carrier
            ]
            yield _of_agent("paceline_transport_carrier_info", known)
        if self.connection is not None:
            connected, connections = self.connection()
            yield _of_agent("paceline_coordinator_connected_info", [((), float(connected))])
            yield _of_agent("paceline_coordinator_connections_total", [((), connections)])


def _samples(place: _Place, *, alive: bool) -> RankSamples:
    assert place.reader is not None
    return RankSamples(str(place.member), alive, place.reader.steps(), place.reader.rounds())


def _family(metric: Metric) -> _Family:
    kinds: dict[MetricKind, type[_Family]] = {
        MetricKind.COUNTER: CounterMetricFamily,
        MetricKind.GAUGE: GaugeMetricFamily,
        MetricKind.HISTOGRAM: HistogramMetricFamily,
    }
    labels = metric.labels if metric.once else (WORKER, *metric.labels)
    return kinds[metric.kind](metric.name, metric.help, labels=labels)


def _of_agent(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Family:
    """Return a metric that the agent itself writes, with the labels and value of each series."""
    family = _family(BY_NAME[name])
    for labels, value in values:
        _add(family, BY_NAME[name], labels, (value,), {})
    return family


def _add(
    family: _Family,
    metric: Metric,
    labels: tuple[str, ...],
    slots: tuple[float, ...],
    exemplars: Mapping[int, Exemplar],
) -> None:
    if not isinstance(family, HistogramMetricFamily):
        family.add_metric(labels, slots[0])
        return
    *counts, total = slots
    buckets: list[tuple[str, float, Exemplar | None]] = []
    below = 0.0
    for place, (bound, count) in enumerate(
        zip((*metric.buckets, float("inf")), counts, strict=True)
    ):
        below += count
        name = "+Inf" if bound == float("inf") else str(bound)
        buckets.append((name, below, exemplars.get(place)))
    family.add_metric(labels, buckets, total)  # type: ignore[arg-type]


def _children(metric: Metric, values: Values) -> Iterable[tuple[str, ...]]:
    """Return the label values of a metric; names of the script's metrics come from the values."""
    if metric.labels == (FIGURE,):
        return [child for name, child in values if name == metric.name]
    return metric.children()


def _values(reading: Reading) -> Values:
    """Return the slots of each child that was written."""
    values: Values = {}
    for (name, child), at in LAYOUT.first.items():
        slots = reading.values[at : at + width(BY_NAME[name])]
        if isnan(slots[0]):
            continue
        named = BY_NAME[name].labels == (FIGURE,)
        values[name, (reading.figures[int(child[0])],) if named else child] = slots
    return values


def _fold(earlier: Values, newer: Values) -> Values:
    """Add the values of two ranks of one place, without gauges."""
    total = dict(earlier)
    for key, slots in newer.items():
        if BY_NAME[key[0]].kind is MetricKind.GAUGE:
            continue
        old = total.get(key)
        total[key] = slots if old is None else tuple(map(sum, zip(old, slots, strict=True)))
    return total
