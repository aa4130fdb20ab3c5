"""The operator's page of metrics: jobs by state."""

from __future__ import annotations

from typing import Any

from paceline_operator.metrics import Metrics


def in_states(metrics: Metrics) -> dict[str, float]:
    lines = metrics.page().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("paceline_operator_jobs")]
    return {name: float(value) for name, value in pairs}


def job(state: str | None) -> dict[str, Any]:
    return {"status": {"state": state}} if state else {}


def test_jobs_are_counted_by_state_and_a_state_without_jobs_is_gone() -> None:
    metrics = Metrics()
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
