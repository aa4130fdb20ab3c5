"""Reasons of conditions and Events that no other test brings about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed
from paceline_api.crdgen import PLURAL
from paceline_api.reasons import Reason
from paceline_api.status import Outcome, RankPhase, Status
from paceline_api.times import timestamp
from paceline_operator.core.changes import Changes
from paceline_operator.core.observed import Observed
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import (
    COORDINATOR,
    NOW,
    RUNNING,
    coordinator_status,
    job_of,
    rank_status,
    training,
    worker,
)
from testing.fake_cluster.world import NAMESPACE, World, job_body

QUEUED = {"scheduling": {"provider": "Kueue"}}


def reason(changes: Changes, kind: str) -> tuple[str, str]:
    """Return the status and the reason of a condition that a decision writes."""
    assert changes.status is not None
    condition = next(c for c in changes.status["conditions"] if c["type"] == kind)
    return condition["status"], condition["reason"]


def events(changes: Changes) -> dict[str, str]:
    return {str(event.reason): event.message for event in changes.events}


def with_coordinator(**fields: Any) -> Observed:
    observed = training()
    assert isinstance(observed.coordinator, Status)
    return replace(observed, coordinator=changed(observed.coordinator, **fields))


def test_another_mode_of_the_rounds_is_an_event() -> None:
    before = RUNNING | {"collective": {"mode": "Quorum"}}
    job = job_of(before, replicas=3, collective={"mode": "Solo"})
    still = reconcile(job, with_coordinator(settings={"mode": "Quorum"}), NOW)
    assert Reason.MODE_CHANGED not in events(still), "it is only asked for"
    now = reconcile(job, with_coordinator(settings={"mode": "Solo"}), NOW)
    assert events(now)[Reason.MODE_CHANGED] == "rounds run in mode Solo instead of Quorum"


def test_a_silent_rank_without_data_degrades_the_job() -> None:
    pods = [worker(slot) for slot in range(3)]
    ranks = list(coordinator_status(pods).ranks)
    ranks[1] = rank_status(1, 1, RankPhase.BENCHED, 1)
    made = reconcile(job_of(RUNNING, replicas=3), with_coordinator(ranks=tuple(ranks)), NOW)
    assert reason(made, "Degraded") == ("True", Reason.RANK_BENCHED)


def test_a_job_below_its_least_number_of_workers_is_degraded() -> None:
    job = job_of(RUNNING, replicas=3, minReplicas=3)
    left = [worker(0), worker(1)]
    observed = training(2, pods=(*left, COORDINATOR))
    assert reason(reconcile(job, observed, NOW), "Degraded") == ("True", Reason.BELOW_MIN_REPLICAS)


def test_a_start_that_waits_for_more_workers_is_settling() -> None:
    pods = [worker(0), worker(1)]
    first = Status(
        coordinator="coordinator-uid", ranks=(rank_status(0, 1, RankPhase.JOINING),), replicas=2
    )
    observed = Observed(pods=(*pods, COORDINATOR), coordinator=first, coordinator_heard_s=NOW)
    made = reconcile(job_of(), observed, NOW)
    assert reason(made, "RingReady") == ("False", Reason.SETTLING)
    assert reason(made, "Scheduled") == ("True", Reason.PODS_PLACED)


def test_a_new_job_starts_and_then_trains() -> None:
    made = reconcile(job_of(), Observed(), NOW)
    assert reason(made, "RingReady") == ("False", Reason.STARTING)
    observed = training(2)
    formed = reconcile(job_of(dict(made.status or {})), observed, NOW + 60)
    assert reason(formed, "RingReady") == ("True", Reason.RING_FORMED)
    assert reason(formed, "Ready") == ("True", Reason.TRAINING)


def test_a_job_of_a_queue_whose_size_varies_gets_a_condition() -> None:
    """Through the queue's label, which the rules of the definition do not see."""
    pods = tuple(worker(slot, queued=True) for slot in range(3))
    job = job_of(RUNNING, replicas=3, **QUEUED)
    assert job.settings is not None
    job = replace(job, settings=replace(job.settings, max_replicas=5))
    made = reconcile(job, training(pods=(*pods, COORDINATOR)), NOW)
    assert reason(made, "Degraded") == ("True", Reason.SIZE_NOT_FIXED)


def test_a_spec_that_breaks_a_rule_is_a_condition_and_an_event() -> None:
    made = reconcile(job_of(minReplicas=9), Observed(), NOW)
    assert reason(made, "Degraded") == ("True", Reason.SPEC_INVALID)
    assert "minReplicas" in events(made)[Reason.SPEC_INVALID]


def test_a_reason_of_a_later_release_is_an_event_of_a_failed_job() -> None:
    """The condition has the coordinator's own word."""
    outcome = Outcome(complete=False, reason="OfTomorrow", message="it went wrong")
    made = reconcile(job_of(RUNNING, replicas=3), with_coordinator(outcome=outcome), NOW)
    assert reason(made, "Failed") == ("True", "OfTomorrow")
    assert events(made)[Reason.JOB_FAILED] == "it went wrong"


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_a_resumed_job_is_not_suspended_any_more(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(checkpoint={"path": "/c"}))
    world.settle(5)
    for suspended in (True, False):
        world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": suspended})
        world.settle(30)
    status = world.server.find(PLURAL, NAMESPACE, "digits")["status"]
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
    assert conditions["Suspended"] == ("False", Reason.RESUMED)


def test_a_problem_that_is_over_is_reported_as_resolved() -> None:
    slow = {"type": "Degraded", "status": "True", "reason": "RankSlow", "message": "it was slow"}
    slow |= {"lastTransitionTime": timestamp(NOW - 60)}
    job = job_of(RUNNING | {"conditions": [*RUNNING["conditions"], slow]}, replicas=3)
    made = reconcile(job, training(), NOW)
    assert reason(made, "Degraded") == ("False", Reason.RESOLVED)
