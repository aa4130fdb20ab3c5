"""Figures of a job's status, from the answer of a coordinator as the runtime encodes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fake_cluster.observations import NOW, RUNNING, job_of, training
from paceline.core.status import LogStatus, Status
from paceline_api.types.status import TrainingJobStatus
from paceline_operator.core.coordinator_status import read_coordinator_status
from paceline_operator.core.reconcile import reconcile

WHY = "mpi:ring 300 us at 1048576 B; next: gloo 610 us"


def status_of(before: dict[str, Any], answer: Status, **spec: Any) -> TrainingJobStatus:
    """What the operator writes when it has heard this."""
    raw = msgspec.json.decode(msgspec.json.encode(answer))
    seen = training(2)
    assert seen.coordinator is not None
    told = replace(read_coordinator_status(raw), ranks=seen.coordinator.ranks)
    changes = reconcile(job_of(before, **spec), replace(seen, coordinator=told), NOW)
    assert changes.status is not None
    return TrainingJobStatus.model_validate(dict(changes.status), by_alias=True)


def answer(**fields: Any) -> Status:
    return Status("digits", "coordinator-uid", replicas=2, version=9, **fields)


@pytest.mark.parametrize(("before", "told", "ranks"), [(0, 3, 3), (5, 3, 5), (0, 0, 0)])
def test_restarts_of_ranks(before: int, told: int, ranks: int) -> None:
    """A coordinator that was made anew knows only of pods that it has met."""
    status = status_of({**RUNNING, "restarts": {"ranks": before}}, answer(restarts=told))
    assert status.restarts is not None
    assert status.restarts.ranks == ranks


@pytest.mark.parametrize(("left_s", "eta"), [(89.6, 90), (None, None)])
def test_how_long_the_rest_takes(left_s: float | None, eta: int | None) -> None:
    status = status_of(RUNNING, answer(log=LogStatus(progress=0.25, left_s=left_s)))
    assert status.progress is not None
    assert (status.progress.percent, status.progress.eta_seconds) == (25, eta)


def test_a_job_that_does_not_run_has_no_time_left() -> None:
    before = {**RUNNING, "progress": {"percent": 25, "etaSeconds": 90}}
    job = job_of(before, suspend=True)
    suspended = reconcile(job, replace(training(2), pods=(), coordinator=None), NOW)
    assert suspended.status is not None
    assert suspended.status["progress"] == {"percent": 25}
    failed = reconcile(job_of(before, activeDeadlineSeconds=1), training(2), NOW)
    assert failed.status is not None
    assert failed.status["progress"] == {"percent": 25}


def test_the_measurement_that_led_to_the_transport() -> None:
    status = status_of(RUNNING, answer(transport="mpi", transport_why=WHY))
    assert status.transport is not None
    assert (status.transport.kind, status.transport.message) == ("mpi", WHY)
