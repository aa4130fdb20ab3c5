"""Suspending a job: what the operator waits for, and how it reports lost progress (C5)."""

from __future__ import annotations

from dataclasses import replace

from paceline_api.times import timestamp
from paceline_operator.core.decide.suspend import suspend
from paceline_operator.core.observed import Observed
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import NOW, RUNNING, job_of, training, worker

START = timestamp(NOW - 100)


def test_suspending_without_a_checkpoint_reports_the_lost_rounds() -> None:
    changes = reconcile(job_of(RUNNING, suspend=True), training(), NOW)
    assert changes.status is not None
    (suspended,) = (c for c in changes.status["conditions"] if c["type"] == "Suspended")
    assert "9 rounds" in suspended["message"]
    assert changes.delete == (), "the status first"
    assert "startTime" not in changes.status


def test_a_resumed_job_gets_its_pods_at_once() -> None:
    """No Event reports ranks that are gone."""
    ring = {"type": "RingReady", "status": "False", "reason": "SuspendedBySpec"}
    status = RUNNING | {"highestAttempt": 2, "conditions": [ring | {"lastTransitionTime": START}]}
    job = job_of(status, checkpoint={"path": "/c"})
    changes = reconcile(job, Observed(), NOW)
    assert [new.name for new in changes.workers] == [f"digits-{slot}-3" for slot in range(2)]
    assert changes.coordinator is not None
    assert changes.events == ()
    killed = reconcile(job_of(RUNNING, checkpoint={"path": "/c"}), Observed(), NOW)
    assert killed.workers == (), "here the coordinator is asked first"


def test_pods_that_a_suspension_deletes_are_not_lost_workers() -> None:
    """They may take their grace period, and the job may be resumed before it is over."""
    suspended = {"type": "Suspended", "status": "False", "reason": "Resumed"}
    ring = {"type": "RingReady", "status": "False", "reason": "SuspendedBySpec"}
    at = {"lastTransitionTime": START}
    status = RUNNING | {"highestAttempt": 2, "conditions": [suspended | at, ring | at]}
    job = job_of(status, checkpoint={"path": "/c"})
    for created_s, count in ((NOW - 200, 0), (NOW - 50, 2)):
        pods = [worker(slot, deleting=True, created_s=created_s) for slot in range(2)]
        changes = reconcile(job, Observed(pods=tuple(pods)), NOW)
        assert len(changes.workers) == 2
        replaced = [event for event in changes.events if event.reason == "RankReplaced"]
        assert len(replaced) == count, "one that is deleted after the resumption is lost"
        assert changes.replaced == count


def test_suspension_waits_for_a_checkpoint_only_with_a_coordinator() -> None:
    job, observed = job_of(RUNNING, suspend=True, checkpoint={"path": "/c"}), training()
    assert suspend(job, observed, NOW).reason == "Suspending"
    alone = replace(observed, pods=tuple(pod for pod in observed.pods if pod.is_worker))
    assert len(suspend(job, alone, NOW).delete) == len(alone.pods) > 0
