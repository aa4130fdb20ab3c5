"""Gangs, queues and disruption budgets on a real API server without a gang scheduler.

The kinds of the groups exist, but nothing acts on them. The behavior of real schedulers is tested
by hand (docs/limits.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from testing.cluster.api import ApiError
from testing.cluster.commands import kubectl
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import (
    Running,
    change,
    holds,
    job,
    living,
    own_requests,
    pods,
    submit,
    until,
    until_quiet,
)
from testing.fake_cluster.parts import job_body
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
BUDGETS = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"
VOLCANO = "/apis/scheduling.volcano.sh/v1beta1/namespaces/{}/podgroups"
COSCHEDULING = "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{}/podgroups"


@contextmanager
def podgroups(plane: ControlPlane, api: str) -> Iterator[None]:
    """Define the PodGroup kind with any fields, and remove it at the end for other tests."""
    group, version = api.removeprefix("/apis/").split("/")[:2]
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {
        "group": group,
        "scope": "Namespaced",
        "names": {"kind": "PodGroup", "plural": "podgroups"},
        "versions": [
            {
                "name": version,
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": schema},
            }
        ],
    }
    name = f"podgroups.{group}"
    # Kubernetes reserves groups that end in k8s.io for approved APIs.
    note = {"api-approved.kubernetes.io": "unapproved, a stand-in of a test"}
    plane.api.create(
        CRDS,
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": name, "annotations": note},
            "spec": spec,
        },
    )
    try:
        until(lambda: served(plane, api), f"{name} is served")
        yield
    finally:
        plane.api.delete(f"{CRDS}/{name}")


def served(plane: ControlPlane, api: str) -> bool:
    try:
        plane.api.items(api.format("default"))
    except ApiError as error:
        if error.status not in (404, 429):  # 429: the API is being set up
            raise
        return False
    return True


def template(**spec: Any) -> dict[str, Any]:
    """Return a template for this cluster's own scheduler, since no other one runs."""
    body = copy.deepcopy(job_body()["spec"]["template"])
    body["spec"] |= {"schedulerName": "default-scheduler", **spec}
    return dict(body)


def gang(provider: str, **more: Any) -> dict[str, Any]:
    return {"scheduling": {"provider": provider, "gang": {}}, "template": template(), **more}


def test_the_pod_group_precedes_the_first_pod_and_follows_the_job(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    with podgroups(plane, VOLCANO), plane.fake_nodes(3), Fleet(plane, namespace):
        body = submit(plane, namespace, replicas=4, minReplicas=2, **gang("Volcano"))
        until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
        (group,) = plane.api.items(VOLCANO.format(namespace))
        assert group["spec"] == {"minMember": 2}
        (owner,) = group["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (body["metadata"]["uid"], True)
        for pod in pods(plane, namespace):
            name = pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
            assert name == group["metadata"]["name"]
            assert pod["metadata"]["creationTimestamp"] >= group["metadata"]["creationTimestamp"]
        asked = own_requests(plane, namespace)
        assert asked["patch", "podgroups"] == 1
        change(plane, namespace, minReplicas=3)
        until(lambda: minimum(plane, namespace) == 3, "minMember follows", 10)
        plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/digits-1-1")
        until(lambda: "digits-1-2" in living(plane, namespace), "a replacement", 10)
        replaced = next(p for p in pods(plane, namespace) if p["metadata"]["name"] == "digits-1-2")
        assert "scheduling.k8s.io/group-name" in replaced["metadata"]["annotations"]


def minimum(plane: ControlPlane, namespace: str) -> int:
    (group,) = plane.api.items(VOLCANO.format(namespace))
    return int(group["spec"]["minMember"])


@pytest.mark.exhaustive
def test_a_missing_provider_is_reported_and_found_once_installed(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    with plane.fake_nodes(2), Fleet(plane, namespace):
        submit(plane, namespace, replicas=2, **gang("Coscheduling"))
        degraded = until(lambda: holds(job(plane, namespace), "Degraded"), "Degraded", 20)
        assert degraded["reason"] == "SchedulerUnavailable"
        assert "does not serve podgroups.scheduling.x-k8s.io" in degraded["message"]
        assert "provider: None" in degraded["message"]
        assert pods(plane, namespace) == []
        assert pods(plane, namespace, "coordinator") == []
        with podgroups(plane, COSCHEDULING):
            until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady", 40)
            assert not holds(job(plane, namespace), "Degraded")
            labels = [pod["metadata"]["labels"] for pod in pods(plane, namespace)]
            (group,) = plane.api.items(COSCHEDULING.format(namespace))
            assert {each["scheduling.x-k8s.io/pod-group"] for each in labels} == {
                group["metadata"]["name"]
            }
    assert running.process is not None
    assert running.process.poll() is None


@pytest.mark.exhaustive
def test_native_gangs_need_kubernetes_1_37(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    submit(plane, namespace, replicas=2, **gang("Native"))
    degraded = until(lambda: holds(job(plane, namespace), "Degraded"), "Degraded", 20)
    assert "podgroups.scheduling.k8s.io (scheduling.k8s.io/v1beta1)" in degraded["message"]
    assert "Kubernetes 1.37" in degraded["message"]
    # The operator retries with growing pauses, not in a loop.
    until_quiet(lambda: own_requests(plane, namespace)["patch", "podgroups"], 2.0, 60.0)
    assert pods(plane, namespace) == []


def test_a_queued_job_waits_with_all_workers_and_no_coordinator(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    """The template sets the gates and labels that Kueue's webhook would set."""
    held = template(schedulingGates=[{"name": "kueue.x-k8s.io/admission"}])
    held["metadata"] = {"labels": {"kueue.x-k8s.io/managed": "true"}}
    body = job_body(replicas=3, template=held)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    with plane.fake_nodes(2), Fleet(plane, namespace):
        plane.api.create(f"/apis/paceline.dev/v1alpha1/namespaces/{namespace}/trainingjobs", body)
        until(lambda: len(living(plane, namespace)) == 3, "3 workers")
        until(lambda: reason(plane, namespace) == "Queued", "the queue is named")
        made = pods(plane, namespace)
        labels = [pod["metadata"]["labels"] for pod in made]
        assert {each["kueue.x-k8s.io/queue-name"] for each in labels} == {"team-a"}
        assert len({each["kueue.x-k8s.io/pod-group-name"] for each in labels}) == 1
        counts = {
            pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for pod in made
        }
        assert counts == {"3"}
        assert pods(plane, namespace, "coordinator") == []
        for pod in made:
            path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
            plane.api.patch(path, {"spec": {"schedulingGates": None}})
        until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
        assert not holds(job(plane, namespace), "Degraded")


def reason(plane: ControlPlane, namespace: str) -> str:
    conditions = job(plane, namespace).get("status", {}).get("conditions", [])
    return next((c["reason"] for c in conditions if c["type"] == "Scheduled"), "")


def test_a_disruption_budget_keeps_min_replicas(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    with plane.fake_nodes(3), Fleet(plane, namespace):
        submit(plane, namespace, replicas=3, minReplicas=2, elasticity={"disruptionBudget": True})
        until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
        until(lambda: allowed(plane, namespace) == 1, "one may go")
        row = kubectl(plane.kubeconfig, "get", "pdb", "-n", namespace, "--no-headers").split()
        assert row[1:4] == ["2", "N/A", "1"]
        assert job(plane, namespace)["status"]["disruptionBudget"] == 2
        change(plane, namespace, minReplicas=3)
        until(lambda: allowed(plane, namespace) == 0, "nobody may go")
        with pytest.raises(ApiError, match="disruption budget"):
            evict(plane, namespace, "digits-0-1")
        evict(plane, namespace, pods(plane, namespace, "coordinator")[0]["metadata"]["name"])
        change(plane, namespace, elasticity={"disruptionBudget": False})
        until(lambda: not plane.api.items(BUDGETS.format(namespace)), "it is gone")
        evict(plane, namespace, "digits-0-1")
        asked = own_requests(plane, namespace)
        assert asked["patch", "poddisruptionbudgets"] == 2
        assert asked["delete", "poddisruptionbudgets"] == 1


def allowed(plane: ControlPlane, namespace: str) -> int:
    budgets = plane.api.items(BUDGETS.format(namespace))
    return int(budgets[0].get("status", {}).get("disruptionsAllowed", -1)) if budgets else -1


def evict(plane: ControlPlane, namespace: str, name: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    plane.api.create(f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)
