"""Metrics of the coordinator, computed from its status when they are scraped.

The metrics of the ranks are served by their agents. These are only the ones that the coordinator
alone can know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from paceline_api.status import RankPhase, Status
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paceline.refusals import Entry, RefusalReason, Refusals

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""Content type of the page."""


class Exporter:
    """Page of metrics for Prometheus."""

    def __init__(self, status: Callable[[], Status], refusals: Refusals) -> None:
        """Prepare the page.

        Args:
            status: Returns the status of the job; called for each scrape.
            refusals: Counter of refused callers and messages.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_Families(status, refusals))

    def text(self) -> bytes:
        """Return the page for one scrape, in the text format of Prometheus."""
        return generate_latest(self._registry)


class _Families(Collector):
    def __init__(self, status: Callable[[], Status], refusals: Refusals) -> None:
        self._status, self._refusals = status, refusals

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        yield GaugeMetricFamily(
            "paceline_coordinator_incarnation_number",
            "Incarnation of the generation in force; grows when the coordinator is replaced.",
            status.generation.incarnation,
        )
        yield GaugeMetricFamily(
            "paceline_membership_generation_number",
            "Counter of the generation in force within this incarnation.",
            status.generation.counter,
        )
        states = Counter(rank.state for rank in status.ranks)
        ranks = GaugeMetricFamily(
            "paceline_ranks",
            f"Ranks by state. state: {', '.join(RankPhase)}.",
            labels=("state",),
        )
        for state in RankPhase:
            ranks.add_metric((state,), states[state])
        yield ranks
        yield GaugeMetricFamily(
            "paceline_replicas_wanted", "Replicas that the job asks for now.", status.replicas
        )
        yield CounterMetricFamily(
            "paceline_rounds_committed_total",
            "Rounds committed, as far as the ranks have reported.",
            status.version,
        )
        yield GaugeMetricFamily(
            "paceline_job_degraded",
            "1 while the condition Degraded holds.",
            any(condition.type == "Degraded" for condition in status.conditions),
        )
        refused = CounterMetricFamily(
            "paceline_refused_total",
            "Messages and connections refused. "
            f"entry: {', '.join(Entry)}; refusal: {', '.join(RefusalReason)}.",
            labels=("entry", "refusal"),
        )
        for labels, count in self._refusals.counts().items():
            refused.add_metric(labels, count)
        yield refused
