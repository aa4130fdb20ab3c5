"""The operator's metrics page: what each metric counts, and jobs by state."""

from __future__ import annotations

from typing import Any

from paceline_api.crdgen import PLURAL
from paceline_operator.cluster.observe import SILENCE_S
from paceline_operator.metrics import OperatorMetrics
from prometheus_client.parser import text_string_to_metric_families

from testing.fake_cluster.inside import Answer, Inside
from testing.fake_cluster.parts import NAMESPACE, job_body


def in_states(metrics: OperatorMetrics) -> dict[str, float]:
    lines = metrics.page().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("paceline_operator_jobs")]
    return {name: float(value) for name, value in pairs}


def job(state: str | None) -> dict[str, Any]:
    return {"status": {"state": state}} if state else {}


def test_jobs_are_counted_by_state_and_states_without_jobs_are_removed() -> None:
    metrics = OperatorMetrics()
    states = ("Training", "QuotaExceeded", "Training", None)
    metrics.set_jobs([job(state) for state in states])
    assert in_states(metrics) == {
        "paceline_operator_jobs": 4,
        'paceline_operator_jobs_in_state{state="QuotaExceeded"}': 1,
        'paceline_operator_jobs_in_state{state="Training"}': 2,
    }
    metrics.set_jobs([job("Complete")])
    assert in_states(metrics) == {
        "paceline_operator_jobs": 1,
        'paceline_operator_jobs_in_state{state="Complete"}': 1,
    }


def figures(world: Inside) -> dict[str, float]:
    """Return the sum of each sample over all its series, and each series with its labels."""
    values: dict[str, float] = {}
    page = world.operator._health.page().decode()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            values[f"{sample.name}{{{labels}}}"] = sample.value
    return values


def test_every_metric_of_the_operator_is_written_and_correct() -> None:
    """One job of two workers trains, its coordinator falls silent, and all watches are cut."""
    world = Inside()
    try:
        assert figures(world).get("leader_election_master_status", 0) == 0
        world.server.insert(PLURAL, NAMESPACE, job_body(replicas=2))
        world.settle(10)
        now = figures(world)
        assert now["leader_election_master_status"] == 1
        assert now["paceline_operator_jobs"] == 1
        assert now["paceline_operator_jobs_in_state{state=Training}"] == 1
        assert now["paceline_operator_pods"] == 3
        assert now["paceline_operator_coordinators_connected"] == 1
        assert now["workqueue_depth"] == 1, "the job waits for its next look"
        assert now["controller_runtime_active_workers"] == 0, "no decision is under way"
        decisions = now["controller_runtime_reconcile_total{controller=trainingjob,result=success}"]
        assert now["controller_runtime_reconcile_total"] == decisions > 1
        assert now["controller_runtime_reconcile_time_seconds_count"] == decisions
        assert now["workqueue_queue_duration_seconds_count"] == decisions
        assert now["workqueue_adds_total"] >= 1
        created = now["rest_client_requests_total{code=201,method=POST}"]
        assert created >= 3, "the three pods among others"
        assert now["paceline_operator_watch_events_total{kind=pods}"] >= 3
        assert "paceline_operator_watch_restarts_total{cause=silence,kind=pods}" not in now
        assert now["paceline_operator_watch_age_seconds{kind=pods}"] < SILENCE_S

        world.misbehave("digits", Answer.OTHER)
        world.settle(30)
        assert figures(world)["paceline_operator_answers_refused_total{reason=form}"] >= 1
        world.misbehave("digits", Answer.REFUSED)
        world.loop.network.cut(world.api.host)
        world.settle(80)
        after = figures(world)
        assert after["paceline_operator_coordinators_connected"] == 0
        assert after["paceline_operator_watch_restarts_total"] > now.get(
            "paceline_operator_watch_restarts_total", 0.0
        )
        families = {family.name for family in OperatorMetrics().registry.collect()}
        shown = {name.partition("{")[0] for name in after}
        silent = {f for f in families if not any(name.startswith(f) for name in shown)}
        assert not silent, f"nothing ever writes {silent}"
    finally:
        world.close()
