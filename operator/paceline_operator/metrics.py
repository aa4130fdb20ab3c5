"""Metrics of the operator itself, under the names of controller-runtime where it has them.

Dashboards and alerts for other operators therefore work. Paceline's own metrics begin with
`paceline_operator_`. No label contains a job's name: a thousand jobs must not make a thousand time
series.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Collection, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTROLLER: Final = "trainingjob"
"""Value of the labels `controller` and `name`."""
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the buckets of durations, in seconds."""


class OperatorMetrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "rest_client_requests",
            "Requests to the API server, by HTTP status and method.",
            ["code", "method"],
            registry=r,
        )
        self.throttled = Counter(
            "paceline_operator_throttled_seconds",
            "Seconds that requests to the API server waited for the limit of --api-qps.",
            registry=r,
        )
        self.reconciles = Counter(
            "controller_runtime_reconcile",
            "Reconciliations of jobs, by result.",
            ["controller", "result"],
            registry=r,
        )
        self.reconcile_seconds = Histogram(
            "controller_runtime_reconcile_time_seconds",
            "Time from the start of a reconciliation to its last write.",
            ["controller"],
            buckets=SECONDS,
            registry=r,
        )
        self.active = Gauge(
            "controller_runtime_active_workers",
            "Reconciliations in progress.",
            ["controller"],
            registry=r,
        )
        self.depth = Gauge("workqueue_depth", "Jobs that wait in the queue.", ["name"], registry=r)
        self.adds = Counter("workqueue_adds", "Jobs put into the queue.", ["name"], registry=r)
        self.wait_seconds = Histogram(
            "workqueue_queue_duration_seconds",
            "Time from when a job is due until its reconciliation starts.",
            ["name"],
            buckets=SECONDS,
            registry=r,
        )
        self.leader = Gauge(
            "leader_election_master_status",
            "1 if this process is the leader, else 0.",
            ["name"],
            registry=r,
        )
        self.jobs = Gauge(
            "paceline_operator_jobs", "Jobs that the operator keeps in memory.", registry=r
        )
        self.states = Gauge(
            "paceline_operator_jobs_in_state",
            "Jobs by status.state, such as Training or QuotaExceeded.",
            ["state"],
            registry=r,
        )
        self.pods = Gauge(
            "paceline_operator_pods", "Pods that the operator keeps in memory.", registry=r
        )
        self.coordinators = Gauge(
            "paceline_operator_coordinators_connected", "Coordinators that answer.", registry=r
        )
        self.answers_refused = Counter(
            "paceline_operator_answers_refused",
            "Answers of coordinators that were refused. reason: form, length, count, share.",
            ["reason"],
            registry=r,
        )
        self.watch_age = Gauge(
            "paceline_operator_watch_age_seconds",
            "Time since a watch last received anything; it must stay below its silence limit.",
            ["kind"],
            registry=r,
        )
        self.watch_restarts = Counter(
            "paceline_operator_watch_restarts",
            "Watches that were opened again, by cause.",
            ["kind", "cause"],
            registry=r,
        )
        self.events = Counter(
            "paceline_operator_watch_events",
            "Watch events received, by kind of object.",
            ["kind"],
            registry=r,
        )

    def set_jobs(self, jobs: Collection[Mapping[str, Any]]) -> None:
        """Count jobs by state, given their objects; one without a state has no status yet."""
        states = Counted((job.get("status") or {}).get("state") for job in jobs)
        self.jobs.set(len(jobs))
        self.states.clear()  # otherwise a state without jobs would keep its last count
        for state, count in states.items():
            if state:
                self.states.labels(state).set(count)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
