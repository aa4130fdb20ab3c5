"""The PodDisruptionBudget of a job: off by default, and with few requests when on (C9)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from paceline_api.crdgen import PLURAL
from paceline_operator.cluster.api import ApiError
from paceline_operator.core.pods.companions import BUDGETS

from testing.fake_cluster.world import NAMESPACE, World, job_body

ON: dict[str, Any] = {"disruptionBudget": True}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def submit(world: World, **spec: Any) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(**{"replicas": 3, "minReplicas": 2, **spec}))


def change(world: World, **spec: Any) -> None:
    world.server.change(PLURAL, NAMESPACE, "digits", spec=spec)
    world.settle(5)


def asked(world: World) -> list[str]:
    """Return the verbs of the writes; a look at the object's owner precedes each."""
    asked = [text.split()[0] for text in world.server.writes if f" {BUDGETS} " in text]
    return [verb for verb in asked if verb != "GET"]


def status(world: World) -> dict[str, Any]:
    current: dict[str, Any] = world.server.find(PLURAL, NAMESPACE, "digits").get("status", {})
    return current


def test_a_job_without_a_budget_sends_no_request_for_it(world: World) -> None:
    submit(world)
    world.settle(10)
    world.start_operator()
    world.settle(10)
    assert asked(world) == []
    assert "disruptionBudget" not in {k for k, v in status(world).items() if v is not None}


def test_the_budget_keeps_min_replicas_of_the_workers(world: World) -> None:
    submit(world, elasticity=ON)
    world.settle(10)
    (budget,) = world.server.of_kind(BUDGETS)
    assert budget["apiVersion"] == "policy/v1"
    assert budget["spec"] == {
        "minAvailable": 2,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {
            "matchLabels": {"paceline.dev/job-name": "digits", "paceline.dev/role": "worker"}
        },
    }
    assert budget["metadata"]["ownerReferences"][0]["kind"] == "TrainingJob"
    assert status(world)["disruptionBudget"] == 2
    assert asked(world) == ["PATCH"]


def test_the_budget_follows_the_job_and_is_deleted_when_turned_off(world: World) -> None:
    submit(world)
    world.settle(10)
    change(world, elasticity=ON)
    change(world, minReplicas=1)
    (budget,) = world.server.of_kind(BUDGETS)
    assert budget["spec"]["minAvailable"] == 1
    change(world, elasticity={"disruptionBudget": False})
    assert world.server.of_kind(BUDGETS) == []
    assert not status(world).get("disruptionBudget")
    assert asked(world) == ["PATCH", "PATCH", "DELETE"]


def test_a_new_operator_knows_the_budget_from_the_status(world: World) -> None:
    submit(world, elasticity=ON)
    world.settle(10)
    world.start_operator()
    world.settle(10)
    assert asked(world) == ["PATCH"], "nothing has changed"
    world.start_operator()
    change(world, elasticity={"disruptionBudget": False})
    assert asked(world) == ["PATCH", "DELETE"]
    assert world.server.of_kind(BUDGETS) == []


def test_a_refused_budget_does_not_block_the_job(world: World) -> None:
    world.server.refusing[BUDGETS] = ApiError(403, "Forbidden", "budgets is forbidden")
    submit(world, elasticity=ON)
    world.settle(60)
    assert status(world)["ready"] == "3/3"
    (condition,) = (c for c in status(world)["conditions"] if c["type"] == "Degraded")
    assert condition["reason"] == "BudgetRefused"
    assert "budgets is forbidden" in condition["message"]
    looks = [text for text in world.server.writes if text.startswith(f"GET {BUDGETS} ")]
    assert 3 <= len(looks) <= 8, "with growing pauses"
    world.server.remove("pods", NAMESPACE, "digits-1-1")
    world.settle(5)
    assert status(world)["ready"] == "3/3"
    world.server.refusing.clear()
    world.settle(70)
    assert status(world)["disruptionBudget"] == 2
    (condition,) = (c for c in status(world)["conditions"] if c["type"] == "Degraded")
    assert condition["status"] == "False"
