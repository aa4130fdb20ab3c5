"""Fabric profiles on a real API server: validated, chosen by what nodes offer, and applied."""

from __future__ import annotations

from typing import Any

import pytest
from paceline_api.rules.fabric import FABRIC_RULES
from paceline_api.types.fabric import OWN
from paceline_operator.core.decide.fabric import fabric_of as choose
from paceline_operator.core.observed import Node
from paceline_operator.core.pods import children
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.fabrics import built_in

from scripts.try_manifests import lost
from testing.bad_fabrics import BREAKING
from testing.cluster.api import ApiError
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import Running, job, living, pods, submit, until
from testing.fake_cluster.fabrics import cluster_of, gpu_job
from testing.fake_cluster.parts import KEY
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes

PROFILES = "/apis/paceline.dev/v1alpha1/fabricprofiles"
GPU = "nvidia.com/gpu"
HCA = "rdma/hca_shared_devices_a"
TRAINER = {
    "name": "trainer",
    "image": "t",
    "command": ["x"],
    "resources": {"limits": {GPU: 1}},
}
TEMPLATE = {"spec": {"containers": [TRAINER]}}


def profile(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "FabricProfile",
        "metadata": {"name": name},
        "spec": spec,
    }


@pytest.mark.parametrize("name", sorted(set(built_in()) - {OWN}))
def test_built_in_profiles_can_be_created_as_objects(plane: ControlPlane, name: str) -> None:
    spec = built_in()[name].model_dump(mode="json", by_alias=True, exclude_none=True)
    path = f"{PROFILES}?dryRun=All&fieldValidation=Strict"
    made = plane.api.create(path, profile(name, spec))
    assert made["spec"] == spec, "the API server has dropped or changed something"


@pytest.mark.parametrize(
    ("spec", "field", "way_out"),
    [
        ({}, "spec.carries", "Required value"),
        ({"carries": "Fast"}, "spec.carries", '"Any", "RDMA", "GPUDirect"'),
        ({"carries": "RDMA", "priority": 9999}, "spec.priority", "should be less than or equal to"),
        (
            {"carries": "RDMA", "pod": {"resources": {"rdma/hca": 0}}},
            "spec.pod.resources",
            "or All for what a node offers",
        ),
        (
            {"carries": "RDMA", "pod": {"resources": {"rdma/hca": "some"}}},
            "spec.pod.resources",
            "or All for what a node offers",
        ),
        ({"carries": "RDMA", "pod": {"shm": "1Gi"}}, "spec.pod.shm", "unknown field"),
        (
            {"carries": "RDMA", "pod": {"dnsPolicy": "Default"}},
            "spec.pod.dnsPolicy",
            '"ClusterFirst", "ClusterFirstWithHostNet"',
        ),
        ({"carries": "RDMA", "pod": {"hostNetwork": 1}}, "spec.pod.hostNetwork", "must be of type"),
        (
            {"carries": "RDMA", "pod": {"privileged": "yes"}},
            "spec.pod.privileged",
            "must be of type",
        ),
        (
            {"carries": "RDMA", "match": {"nodeExpressions": [{"key": "a", "operator": "Gt"}]}},
            "spec.match.nodeExpressions[0].operator",
            '"In", "NotIn", "Exists", "DoesNotExist"',
        ),
        (
            {"carries": "RDMA", "match": {"nodeExpressions": [{"key": "a", "operator": "In"}]}},
            "spec.match.nodeExpressions",
            "give In and NotIn values, and Exists and DoesNotExist none",
        ),
        *(
            ({"carries": "RDMA", **BREAKING[rule.path]}, rule.path, rule.message)
            for rule in FABRIC_RULES
        ),
    ],
)
def test_an_invalid_profile_is_refused_with_field_and_remedy(
    plane: ControlPlane, spec: dict[str, Any], field: str, way_out: str
) -> None:
    with pytest.raises(ApiError) as caught:
        plane.api.create(f"{PROFILES}?dryRun=All&fieldValidation=Strict", profile("p", spec))
    assert field in caught.value.reason
    assert way_out in caught.value.reason


@pytest.mark.parametrize("name", ["auto", "template"])
def test_a_profile_cannot_have_a_name_that_jobs_use_otherwise(
    plane: ControlPlane, name: str
) -> None:
    with pytest.raises(ApiError) as caught:
        plane.api.create(f"{PROFILES}?dryRun=All", profile(name, {"carries": "RDMA"}))
    assert "metadata.name is auto or template" in caught.value.reason
    assert "use another name" in caught.value.reason


@pytest.mark.parametrize("name", sorted(built_in()))
def test_pods_with_a_built_in_profile_are_accepted(plane: ControlPlane, name: str) -> None:
    """A GPU template with what the profile adds, as the API server sees it."""
    offers = dict.fromkeys(resources_of(name), 32)
    nodes = {"n": Node("n", offers={GPU: 8} | offers)}
    job = gpu_job(profile=name)
    chosen = choose(job, cluster_of(nodes))
    assert isinstance(chosen, ChosenFabric)
    pod = children.worker(job, 0, 1, fabric=chosen, key_id=KEY)
    del pod["metadata"]["ownerReferences"]
    path = "/api/v1/namespaces/default/pods?dryRun=All&fieldValidation=Strict"
    made = plane.api.create(path, pod)
    assert [*lost("spec", pod["spec"], without_quantities(made["spec"], pod["spec"]))] == []


def resources_of(name: str) -> list[str]:
    pod = built_in()[name].pod
    return list((pod.resources if pod else None) or {})


def without_quantities(made: dict[str, Any], sent: dict[str, Any]) -> dict[str, Any]:
    """Return the pod with its resources as they were sent: the API server writes 8 as "8"."""
    resources = {each["name"]: each.get("resources") for each in sent["containers"]}
    for container in made["containers"]:
        asked = resources[container["name"]] or {}
        for part, amounts in asked.items():
            if isinstance(amounts, dict):
                same = {key: str(value) for key, value in amounts.items()}
                assert container["resources"][part] == same
                container["resources"][part] = amounts
    return made


def offer(plane: ControlPlane, names: list[str], **more: str) -> None:
    for name in names:
        amounts = {GPU: "8", HCA: "63", **more}
        status = {"status": {"capacity": amounts, "allocatable": amounts}}
        plane.api.patch(f"/api/v1/nodes/{name}/status", status)


def state(plane: ControlPlane, namespace: str, name: str = "digits") -> str:
    return str(job(plane, namespace, name).get("status", {}).get("state"))


def fabric_of(plane: ControlPlane, namespace: str, name: str) -> dict[str, Any] | None:
    fabric: dict[str, Any] | None = job(plane, namespace, name).get("status", {}).get("fabric")
    return fabric


def test_a_job_gets_the_profile_that_its_nodes_offer_or_that_it_names(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    with plane.fake_nodes(2) as nodes, Fleet(plane, namespace):
        submit(plane, namespace, replicas=2, fabric={"required": "RDMA"}, template=TEMPLATE)
        until(lambda: state(plane, namespace) == "FabricUnavailable", "no node has RDMA")
        assert pods(plane, namespace) == []
        offer(plane, nodes.names)
        until(lambda: len(living(plane, namespace)) == 2, "workers, as soon as nodes have it", 20)
        (first, _) = pods(plane, namespace)
        assert first["spec"]["containers"][0]["resources"]["limits"][HCA] == "1"
        chosen = until(lambda: fabric_of(plane, namespace, "digits"), "the status tells")
        assert chosen["profile"] == "rdma-hca-shared-devices-a"

        own = {"carries": "RDMA", "pod": {"env": [{"name": "NCCL_IB_HCA", "value": "mlx5_7"}]}}
        plane.api.create(PROFILES, profile("mine", own))
        try:
            asked = {"profile": "mine", "required": "RDMA"}
            submit(plane, namespace, "named", replicas=1, fabric=asked, template=TEMPLATE)
            until(lambda: len(living(plane, namespace)) == 3, "a worker with the cluster's own")
            trainer = next(
                pod["spec"]["containers"][0]
                for pod in pods(plane, namespace)
                if pod["metadata"]["name"] == "named-0-1"
            )
            assert {"name": "NCCL_IB_HCA", "value": "mlx5_7"} in trainer["env"]
        finally:
            plane.api.delete(f"{PROFILES}/mine")


@pytest.mark.exhaustive
def test_a_restricted_namespace_gets_plain_pods_unless_rdma_is_required(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    with plane.fake_nodes(2) as nodes, Fleet(plane, namespace):
        offer(plane, nodes.names)
        submit(plane, namespace, "plain", replicas=2, template=TEMPLATE)
        asked = {"required": "RDMA"}
        submit(plane, namespace, "asks", replicas=2, fabric=asked, template=TEMPLATE)
        until(lambda: len(living(plane, namespace)) == 2, "plain workers")
        fabric = until(lambda: fabric_of(plane, namespace, "plain"), "the status tells")
        assert fabric["profile"] == "tcp"
        assert "nobody has asked" in fabric["message"]
        until(lambda: state(plane, namespace, "asks") == "PodSecurity", "refused")
        assert {pod["metadata"]["name"] for pod in pods(plane, namespace)} == {
            "plain-0-1",
            "plain-1-1",
        }
