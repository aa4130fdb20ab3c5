"""The life of one job, from its creation to its completion, against the fake cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from paceline_api.crdgen import PLURAL
from paceline_operator.cluster.api import ApiError

from testing.fake_cluster.world import NAMESPACE, World, job_body


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def status(world: World, job: str = "digits") -> dict[str, Any]:
    current: dict[str, Any] = world.server.find(PLURAL, NAMESPACE, job).get("status", {})
    return current


def holds(world: World, kind: str) -> bool:
    return any(
        c["type"] == kind and c["status"] == "True" for c in status(world).get("conditions", [])
    )


def names(world: World, role: str = "worker") -> list[str]:
    return [body["metadata"]["name"] for body in world.pods(role=role)]


def test_a_job_replaces_a_lost_worker_and_completes(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body())
    world.settle(5)
    assert names(world) == ["digits-0-1", "digits-1-1"]
    assert names(world, "coordinator") == ["digits-coordinator-1"]
    assert status(world)["ready"] == "2/2"
    assert holds(world, "RingReady")

    world.server.remove("pods", NAMESPACE, "digits-1-1")
    world.settle(5)
    assert names(world) == ["digits-0-1", "digits-1-2"]
    assert status(world)["restarts"]["replicas"] == 1

    world.settle(5)
    world.finish()
    world.settle(60)
    assert holds(world, "Complete")
    assert status(world)["state"] == "Complete"
    rows = [(row["member"], row["state"]) for row in status(world)["ranks"]]
    assert rows == [("0.0#1000", "finished"), ("1.0#2000", "finished")], "not the one replaced"
    assert names(world) == ["digits-0-1", "digits-1-2"], "ended pods are kept for their logs"
    assert names(world, "coordinator") == []


def test_requests_stay_within_the_budget(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(replicas=8))
    for _ in range(40):
        world.settle(0.5, step_s=0.05)
        if holds(world, "RingReady"):
            break
    assert holds(world, "RingReady")
    assert world.server.requests.total() <= 8 + 7, world.server.writes
    world.settle(10)
    world.finish()
    world.settle(100)
    assert holds(world, "Complete")
    assert world.server.requests.total() <= 8 + 12 + 2, world.server.writes


def test_a_write_conflict_does_not_stop_the_job(world: World) -> None:
    """Another operator, or kubectl, writes the status at the same moment."""
    world.server.insert(PLURAL, NAMESPACE, job_body())
    patch = world.server.patch
    refused: list[Any] = []

    def conflict(kind: str, *what: Any, force: bool) -> Any:
        if kind == PLURAL and not refused:
            refused.append(kind)
            raise ApiError(409, "Conflict", "the object has been modified")
        return patch(kind, *what, force=force)

    setattr(world.server, "patch", conflict)  # noqa: B010
    world.settle(5)
    assert refused
    assert holds(world, "RingReady")


def test_a_recreated_job_takes_the_place_of_the_old_one(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body())
    world.settle(5)
    old = world.server.find(PLURAL, NAMESPACE, "digits")["metadata"]["uid"]
    world.server.remove(PLURAL, NAMESPACE, "digits")
    new = world.server.insert(PLURAL, NAMESPACE, job_body())["metadata"]["uid"]
    world.server.remove("pods", NAMESPACE, "digits-1-1")
    world.settle(5)
    assert {key: body["metadata"]["uid"] for key, body in world.store.jobs.items()} == {
        (NAMESPACE, "digits"): new
    }
    assert old != new
