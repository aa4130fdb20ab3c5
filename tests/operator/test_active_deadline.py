"""activeDeadlineSeconds counts as that of a batch/v1 Job does: only while the job is active."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from paceline_api.crdgen import PLURAL
from paceline_api.times import timestamp
from paceline_operator.core.job import read_job
from paceline_operator.core.observed import Observed
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import NOW, UID, worker
from testing.fake_cluster.parts import START_S
from testing.fake_cluster.world import NAMESPACE, World, job_body

LIMIT_S = 300
QUEUE = {"kueue.x-k8s.io/queue-name": "team"}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def submit(world: World, **spec: Any) -> None:
    body = job_body(activeDeadlineSeconds=LIMIT_S, checkpoint={"path": "/c"}, **spec)
    world.server.insert(PLURAL, NAMESPACE, body)


def change(world: World, **spec: Any) -> None:
    world.server.change(PLURAL, NAMESPACE, "digits", spec=spec)


def status(world: World) -> dict[str, Any]:
    current: dict[str, Any] = world.server.find(PLURAL, NAMESPACE, "digits")["status"]
    return current


def failed(world: World) -> dict[str, Any] | None:
    return next((c for c in status(world)["conditions"] if c["type"] == "Failed"), None)


def test_a_job_that_never_starts_fails_at_its_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_bind", lambda *_: None)
    submit(world)
    world.settle(LIMIT_S - 30, step_s=10)
    assert failed(world) is None
    world.settle(60, step_s=10)
    condition = failed(world)
    assert condition is not None
    assert condition["reason"] == "DeadlineExceeded"
    assert f"{LIMIT_S} s" in condition["message"]
    assert "did not train in this time: " in condition["message"]
    assert world.pods() == [], "no pod waits for a job that is over"


def test_the_time_of_a_suspension_does_not_count(world: World) -> None:
    submit(world)
    world.settle(LIMIT_S - 60, step_s=10)
    change(world, suspend=True)
    world.settle(3 * LIMIT_S, step_s=10)
    assert status(world)["state"] == "Suspended"
    assert "activeTime" not in status(world)
    change(world, suspend=False)
    world.settle(LIMIT_S - 60, step_s=10)
    assert failed(world) is None, "it began anew when the job was resumed"
    assert status(world)["state"] == "Training"
    world.settle(90, step_s=10)
    condition = failed(world)
    assert condition is not None
    assert condition["reason"] == "DeadlineExceeded"
    assert "did not train" not in condition["message"]


def test_a_job_created_suspended_has_all_its_time_when_it_starts(world: World) -> None:
    submit(world, suspend=True)
    world.settle(2 * LIMIT_S, step_s=10)
    change(world, suspend=False)
    world.settle(LIMIT_S - 60, step_s=10)
    assert status(world)["state"] == "Training"


def test_a_deadline_set_on_a_running_job_counts_from_its_start(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body())
    world.settle(LIMIT_S, step_s=10)
    change(world, activeDeadlineSeconds=LIMIT_S + 60)
    world.settle(30, step_s=10)
    assert failed(world) is None
    world.settle(60, step_s=10)
    assert failed(world) is not None


def test_the_time_in_a_queue_does_not_count() -> None:
    """A Job waits in Kueue's queue suspended; the pods of a TrainingJob wait there themselves."""
    body = job_body(activeDeadlineSeconds=LIMIT_S)
    body["metadata"] |= {"uid": UID, "generation": 1, "labels": QUEUE}
    body["metadata"]["creationTimestamp"] = timestamp(START_S)
    waiting = tuple(worker(slot, node="", phase="Pending", queued=True) for slot in range(2))
    made = reconcile(read_job(body), Observed(pods=waiting), NOW)
    assert made.status is not None
    assert "activeTime" not in made.status
    placed = tuple(replace(pod, node="a", phase="Running") for pod in waiting)
    admitted = reconcile(read_job(body | {"status": made.status}), Observed(pods=placed), NOW + 9)
    assert admitted.status is not None
    assert admitted.status["activeTime"] == timestamp(NOW + 9)
