"""The operator leaves the objects of others alone, even if they have a name that it uses."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from paceline_api.crdgen import PLURAL
from paceline_api.names import COORDINATOR_SERVICE, group_name
from paceline_api.types.enums import SchedulingProvider
from paceline_operator.cluster.api import MANAGER, ApiError
from paceline_operator.cluster.ownership import TakenError, apply_own, delete_own, is_own
from paceline_operator.cluster.services import Services
from paceline_operator.core.pods.companions import BUDGETS
from paceline_operator.core.pods.service import KEEP_S
from paceline_operator.core.providers.choice import GANGS

from testing.fake_cluster.server import Server
from testing.fake_cluster.world import NAMESPACE, World, job_body

UID = "job-uid"
OWNED = [{"uid": UID, "controller": True}]
MINE = [{"manager": MANAGER, "operation": "Apply"}]
THEIRS = [{"manager": "kubectl-create", "operation": "Update"}]
STATUS = [{"manager": MANAGER, "operation": "Update", "subresource": "status"}]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def existing(**metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "x", "uid": "uid-x", **metadata}, "spec": {"theirs": True}}


def manifest(owner: str = "") -> dict[str, Any]:
    owners = {"ownerReferences": OWNED} if owner else {}
    return {"metadata": {"name": "x", **owners}, "spec": {"mine": True}}


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "nobody says whose": (existing(), ""),
    "made by kubectl": (existing(managedFields=THEIRS), ""),
    "made by kubectl, owned by the job": (
        existing(managedFields=THEIRS, ownerReferences=OWNED),
        UID,
    ),
    "made by an operator for another job": (
        existing(managedFields=MINE, ownerReferences=[{"uid": "other", "controller": True}]),
        UID,
    ),
    "owned by the job, but not controlled": (
        existing(managedFields=MINE, ownerReferences=[{"uid": UID}]),
        UID,
    ),
    "made by an operator for no job": (existing(managedFields=MINE), UID),
    "made for a job where it is of all jobs": (
        existing(managedFields=MINE, ownerReferences=OWNED),
        "",
    ),
    "only its status was written by the operator": (existing(managedFields=STATUS), ""),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("kind", ["services", BUDGETS, "podgroups", "configmaps"])
def test_a_foreign_object_is_neither_changed_nor_deleted(name: str, kind: str) -> None:
    body, owner = FOREIGN[name]
    server = Server(lambda: 0.0)
    server.objects[kind, NAMESPACE, "x"] = before = copy.deepcopy(body)
    with pytest.raises(TakenError) as error:
        asyncio.run(apply_own(server, kind, NAMESPACE, manifest(owner), owner=owner))
    asyncio.run(delete_own(server, kind, NAMESPACE, "x", owner=owner))
    assert server.find(kind, NAMESPACE, "x") is before
    assert before == body
    for part in (kind, "x", NAMESPACE, "kubectl delete"):
        assert part in error.value.message


@pytest.mark.parametrize("owner", ["", UID])
def test_an_own_object_is_applied_over_changes_of_others(owner: str) -> None:
    server = Server(lambda: 0.0)
    asyncio.run(apply_own(server, "services", NAMESPACE, manifest(owner), owner=owner))
    body = server.find("services", NAMESPACE, "x")
    assert is_own(body, owner)
    body["metadata"]["managedFields"] += THEIRS
    body["spec"] = {"theirs": True}
    asyncio.run(apply_own(server, "services", NAMESPACE, manifest(owner), owner=owner))
    assert body["spec"] == {"mine": True}
    asyncio.run(delete_own(server, "services", NAMESPACE, "x", owner=owner))
    assert server.of_kind("services") == []


def test_an_object_created_by_a_racing_client_is_not_taken_over() -> None:
    class Racing(Server):
        async def get(self, kind: str, namespace: str, name: str) -> Any:
            self.objects[kind, namespace, name] = existing(managedFields=THEIRS)
            raise ApiError(404, "NotFound", "not yet")

    server = Racing(lambda: 0.0)
    with pytest.raises(ApiError, match="Conflict"):
        asyncio.run(apply_own(server, "services", NAMESPACE, manifest()))
    assert server.find("services", NAMESPACE, "x")["spec"] == {"theirs": True}


def degraded(world: World) -> dict[str, Any]:
    status = world.server.find(PLURAL, NAMESPACE, "digits").get("status", {})
    return next((c for c in status.get("conditions", ()) if c["type"] == "Degraded"), {})


GANG = {"scheduling": {"provider": "Native", "gang": {}}}


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("services", {}),
        (BUDGETS, {"elasticity": {"disruptionBudget": True}}),
        (GANGS[SchedulingProvider.NATIVE].api.resource, GANG),
    ],
)
def test_a_job_reports_a_taken_name_and_continues_once_it_is_free(
    world: World, kind: str, spec: dict[str, Any]
) -> None:
    job = world.server.insert(PLURAL, NAMESPACE, job_body(replicas=2, minReplicas=1, **spec))
    name = COORDINATOR_SERVICE
    if kind != "services":
        name = group_name("digits", job["metadata"]["uid"])
    theirs = existing(name=name, namespace=NAMESPACE, managedFields=THEIRS, resourceVersion="1")
    world.server.objects[kind, NAMESPACE, name] = theirs
    world.settle(10)
    assert degraded(world)["status"] == "True"
    assert degraded(world)["reason"] == "NameTaken"
    assert "kubectl-create" in degraded(world)["message"]
    assert f"kubectl delete {kind} {name}" in degraded(world)["message"]
    assert world.server.find(kind, NAMESPACE, name)["spec"] == {"theirs": True}
    events = [e for e in world.server.of_kind("events") if e["reason"] == "NameTaken"]
    assert len(events) == 1
    world.server.remove(kind, NAMESPACE, name)
    world.settle(90)
    assert degraded(world)["status"] == "False"
    assert world.server.find(kind, NAMESPACE, name)["spec"] != {"theirs": True}


def test_a_foreign_service_is_kept_after_the_last_job() -> None:
    server, now_s = Server(lambda: 0.0), 0.0
    theirs = existing(name=COORDINATOR_SERVICE, namespace="a", managedFields=THEIRS)
    server.objects["services", "a", COORDINATOR_SERVICE] = theirs
    services = Services(server, lambda: now_s, set)
    asyncio.run(services.look(lambda: True))
    now_s = KEEP_S
    asyncio.run(services.look(lambda: True))
    assert server.of_kind("services") == [theirs]
