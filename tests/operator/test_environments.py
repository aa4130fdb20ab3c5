"""The clouds and networks with a fabric profile: recognized by their nodes, and as in public forms.

For each environment there are nodes as it labels them, and a manifest in its public form
(testing/manifests). The profile must be the one that is found on such nodes, it must give a plain
template of GPUs what the public form has for the network, and a template in the public form must
stay as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline_api.pods.devices import is_device
from paceline_api.types.enums import FabricRequirement
from paceline_api.types.fabric import OWN, PLAIN
from paceline_operator.core.decide.fabric import NoFabric, fabric_of
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Node
from paceline_operator.core.pods import children
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.fabrics import built_in

from scripts.try_manifests import Template, job_of, templates_in
from testing.fake_cluster.fabrics import GPU, cluster_of, gpu_job, name_of
from testing.fake_cluster.observations import job_of as job_with
from testing.fake_cluster.parts import KEY

MANIFESTS = Path(__file__).parents[2] / "testing" / "manifests"
CORES = ("cpu", "memory", "hugepages-2Mi", "nvidia.com/gpu")
OF_NETWORKS = ("k8s.v1.cni.cncf.io/", "networking.gke.io/", "devices.gke.io/")
VARIABLES = re.compile(r"-x ((?:NCCL|UCX|NVIDIA_IMEX|SHARP|FI|CUDA_DEVICE)\w*)=(\S+)")
SET_BY_SCRIPTS = ("FI_PROVIDER", "NCCL_DEBUG")


@dataclass(frozen=True)
class Environment:
    """Nodes of one environment and a manifest in its public form."""

    profile: str
    file: str
    labels: dict[str, str] = field(default_factory=dict)
    offers: dict[str, int] = field(default_factory=dict)
    owner: str = ""
    """Object of the file that holds the template; empty for the first one with GPUs."""

    def nodes(self) -> dict[str, Node]:
        one = Node("node-1", offers=GPU | self.offers, labels=self.labels)
        return {"node-1": one, "node-2": replace(one, name="node-2")}

    def templates(self) -> list[Template]:
        templates, _ = templates_in(MANIFESTS / self.file)
        return [each for each in templates if not self.owner or f" {self.owner}" in each.where]

    def worker(self) -> Template:
        """Return the template of the pods that use the network."""
        return next(each for each in self.templates() if "Launcher" not in each.where)


COREWEAVE = {"rdma/ib": 1000}
TYPE, SHAPE = "node.coreweave.cloud/type", "node.kubernetes.io/instance-type"
FLAVOR = "backend.coreweave.cloud/flavor"
ACCELERATOR = "cloud.google.com/gke-accelerator"
AKS = {"kubernetes.azure.com/cluster": "MC_group_cluster_region"}
ENVIRONMENTS = [
    Environment("azure-ib", "aks.yaml", AKS, {"rdma/ib": 8}, "MPIJob aks-exclusive"),
    Environment("azure-shared-ib", "aks.yaml", AKS, {"rdma/shared_ib": 63}, "Job aks-shared"),
    Environment(
        "coreweave-ib",
        "coreweave-h100.yaml",
        {TYPE: "gd-8xh100ib-i128", FLAVOR: "infiniband"},
        COREWEAVE,
    ),
    Environment("coreweave-gb200", "coreweave-gb200.yaml", {TYPE: "gb200-4x"}, COREWEAVE),
    Environment("coreweave-gb300", "coreweave-gb300.yaml", {TYPE: "gb300-4x"}, COREWEAVE),
    Environment(
        "coreweave-gb300-roce",
        "coreweave-gb300-roce.yaml",
        {TYPE: "gb300-4x", FLAVOR: "roce"},
        COREWEAVE,
    ),
    Environment("oci-h100", "oci-h100.yaml", {SHAPE: "BM.GPU.H100.8"}),
    Environment("oci-h200", "oci-h200.yaml", {SHAPE: "BM.GPU.H200.8"}),
    Environment("oci-vf", "oci-vf.yaml", {SHAPE: "BM.GPU.H100.8"}, {"nvidia.com/rdma-vf": 16}),
    Environment("gke-rdma", "gke-rdma.yaml", {ACCELERATOR: "nvidia-h200-141gb"}),
    Environment(
        "gke-dranet",
        "gke-dranet.yaml",
        {ACCELERATOR: "nvidia-b200", "cloud.google.com/gke-networking-dra-driver": "true"},
    ),
    Environment("gke-tcpx", "gke-tcpx.yaml", {ACCELERATOR: "nvidia-h100-80gb"}, {}, "Pod tcpx-1"),
    Environment("gke-tcpxo", "gke-tcpxo.yaml", {ACCELERATOR: "nvidia-h100-mega-80gb"}),
    Environment(
        "rdma-shared-device-a", "mellanox.yaml", {}, {"rdma/rdma_shared_device_a": 63}, "Pod shared"
    ),
    Environment(
        "rdma-hca-shared-devices-a",
        "mellanox.yaml",
        {},
        {"rdma/hca_shared_devices_a": 63},
        "Pod shared-hca",
    ),
    Environment("sriov-ib", "mellanox.yaml", {}, {"nvidia.com/mlnxnics": 8}, "Pod sriov-ib"),
    Environment("hostdev", "mellanox.yaml", {}, {"nvidia.com/hostdev": 8}, "Pod hostdev"),
    Environment("ipoib", "mellanox.yaml", {}, {"rdma/rdma_shared_device_a": 63}, "Pod ipoib"),
    Environment("aws-efa", "aws-efa.yaml", {SHAPE: "p5.48xlarge"}, {"vpc.amazonaws.com/efa": 32}),
]
BY_NAME_ALONE = ("ipoib",)
"""Profiles whose nodes another one fits as well, which adds less."""
each_environment = pytest.mark.parametrize("env", ENVIRONMENTS, ids=lambda env: env.profile)


def test_each_built_in_profile_has_an_environment() -> None:
    assert {env.profile for env in ENVIRONMENTS} == set(built_in()) - {PLAIN, OWN}


# ---- recognized by the nodes ----------------------------------------------------------------


def required_on(env: Environment) -> ChosenFabric | NoFabric:
    carries = built_in()[env.profile].carries
    if carries == FabricRequirement.ANY or env.profile in BY_NAME_ALONE:
        return fabric_of(gpu_job(profile=env.profile), cluster_of(env.nodes()))
    return fabric_of(gpu_job(str(carries)), cluster_of(env.nodes()))


@each_environment
def test_the_nodes_of_an_environment_say_which_profile_it_is(env: Environment) -> None:
    assert name_of(required_on(env)) == env.profile
    unasked = fabric_of(gpu_job(), cluster_of(env.nodes()))
    assert isinstance(unasked, ChosenFabric)
    text = unasked.profile if unasked.profile != PLAIN else unasked.message
    if env.profile not in BY_NAME_ALONE:
        assert env.profile in text


def test_coreweave_gives_its_shared_resource_unasked_and_once() -> None:
    """The pods need no privileges, and 1 of the 1,000 gives a pod all adapters."""
    for env in ENVIRONMENTS:
        if env.profile.startswith("coreweave"):
            chosen = fabric_of(gpu_job(), cluster_of(env.nodes()))
            assert isinstance(chosen, ChosenFabric)
            assert (chosen.profile, chosen.pod["resources"]) == (env.profile, {"rdma/ib": 1})


@pytest.mark.parametrize("required", ["", "RDMA"])
def test_a_resource_of_two_providers_is_not_guessed_without_their_labels(required: str) -> None:
    """AKS gives a pod 8 of `rdma/ib`, CoreWeave 1 of 1,000; nothing here says which it is."""
    nodes = {"node-1": Node("node-1", offers=GPU | {"rdma/ib": 1000})}
    choice = fabric_of(gpu_job(required), cluster_of(nodes))
    words = choice.why if isinstance(choice, NoFabric) else choice.message
    assert isinstance(choice, NoFabric) == bool(required)
    assert "azure-ib (nodes with kubernetes.azure.com/cluster Exists)" in words
    assert "coreweave-ib (nodes with node.coreweave.cloud/type Exists and" in words
    assert "Name one in spec.fabric.profile" in words
    # Whoever names it knows: then the resource decides how much a pod gets.
    named = fabric_of(gpu_job(profile="coreweave-ib"), cluster_of(nodes))
    assert isinstance(named, ChosenFabric)
    assert named.pod["resources"] == {"rdma/ib": 1}


@pytest.mark.parametrize("required", ["", "RDMA"])
def test_two_networks_of_one_priority_are_not_guessed(required: str) -> None:
    both = {"nvidia.com/mlnxnics": 8, "nvidia.com/hostdev": 8}
    choice = fabric_of(gpu_job(required), cluster_of({"n": Node("n", offers=GPU | both)}))
    words = choice.why if isinstance(choice, NoFabric) else choice.message
    assert isinstance(choice, NoFabric) == bool(required)
    assert "the profiles hostdev and sriov-ib fit the nodes alike" in words
    assert "spec.fabric.profile" in words


# ---- what pods get --------------------------------------------------------------------------


def parts_of(spec: dict[str, Any], container: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a container and its pod have for the network, by what it is and not by name."""
    for name in ("hostNetwork", "dnsPolicy"):
        if spec.get(name):
            yield name, spec[name]
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or ()}
    for mount in container.get("volumeMounts") or ():
        path = (volumes[mount["name"]].get("hostPath") or {}).get("path")
        if path not in (None, "/dev/shm"):
            yield "path", (path, "/run/tcpx" if path == "/run/tcpx" else mount["mountPath"])
    resources = container.get("resources") or {}
    for name, amount in (resources.get("limits") or {}).items():
        if is_device(name) and name not in CORES:
            yield "resource", (name, str(amount))
    claims = {claim["name"]: claim for claim in spec.get("resourceClaims") or ()}
    for claim in resources.get("claims") or ():
        yield "claim", claims[claim["name"]]["resourceClaimTemplateName"]
    context = container.get("securityContext") or {}
    if context.get("privileged"):
        yield "privileged", True
    else:
        for name in (context.get("capabilities") or {}).get("add") or ():
            yield "capability", name
    for variable in container.get("env") or ():
        yield "env", (variable["name"], variable.get("value"))


def main_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the container with the devices."""

    def devices(container: dict[str, Any]) -> list[str]:
        return [
            name for name in (container.get("resources") or {}).get("limits") or () if "/" in name
        ]

    main: dict[str, Any] = next(
        (each for each in spec["containers"] if devices(each)), spec["containers"][0]
    )
    return main


def network_notes(metadata: dict[str, Any]) -> dict[str, Any]:
    notes = metadata.get("annotations") or {}
    return {
        name: yaml.safe_load(text) for name, text in notes.items() if name.startswith(OF_NETWORKS)
    }


def daemons(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the containers beside the main one that serve the network."""
    every = (*spec["containers"], *(spec.get("initContainers") or ()))
    return {each["name"]: each for each in every if each["name"].endswith("-daemon")}


@each_environment
def test_a_profile_gives_a_plain_template_what_the_public_form_has(env: Environment) -> None:
    public = env.worker().body
    chosen = required_on(env)
    assert isinstance(chosen, ChosenFabric)
    pod = children.worker(gpu_job(), 0, 1, fabric=chosen, key_id=KEY)
    trainer = pod["spec"]["containers"][0]
    got = list(parts_of(pod["spec"], trainer))
    for part in parts_of(public["spec"], main_of(public["spec"])):
        assert part in got, f"the public form has {part}"
    notes = network_notes(public.get("metadata") or {})
    if env.profile != "azure-shared-ib":  # its second network is for IP alone
        assert network_notes(pod["metadata"]) == notes
    made = daemons(pod["spec"])
    for name, daemon in daemons(public["spec"]).items():
        assert made[name]["restartPolicy"] == "Always", "it would outlive the job"
        for same in ("image", "command", "args"):
            assert made[name].get(same) == daemon.get(same)
        wanted = [*parts_of(public["spec"], daemon)]
        assert [part for part in wanted if part not in [*parts_of(pod["spec"], made[name])]] == []
    variables = {v["name"]: v.get("value") for v in trainer["env"]}
    for launcher in env.templates():
        text = " ".join(launcher.body["spec"]["containers"][0].get("args") or ())
        for name, value in VARIABLES.findall(text):
            assert variables.get(name) == value, f"the public form sets {name}={value}"


# ---- a template in the public form ----------------------------------------------------------


def by_hand(env: Environment, required: str = "") -> JobObject:
    manifest, _ = job_of(env.worker())
    spec = manifest["spec"] | ({"fabric": {"required": required}} if required else {})
    job = job_with(**spec)
    assert not job.problems, job.problems
    return job


@each_environment
def test_a_template_that_asks_for_the_network_by_hand_is_recognized(env: Environment) -> None:
    choice = fabric_of(by_hand(env), cluster_of(env.nodes()))
    assert choice == ChosenFabric(OWN, "GPUDirect", {}), (
        "nothing is added, and nothing is complained of"
    )


def test_a_network_asked_for_by_hand_is_filled_in_only_if_it_is_required() -> None:
    env = next(env for env in ENVIRONMENTS if env.profile == "aws-efa")
    choice = fabric_of(by_hand(env, "RDMA"), cluster_of(env.nodes()))
    assert name_of(choice) == "aws-efa"
    elsewhere = {"n": Node("n", offers=GPU | {"rdma/ours": 1})}
    job = gpu_job("RDMA", trainer={"resources": {"limits": {"nvidia.com/gpu": 8, "rdma/ours": 1}}})
    assert name_of(fabric_of(job, cluster_of(elsewhere))) == OWN


def test_a_job_can_say_that_its_template_is_all_that_its_pods_get() -> None:
    env = next(env for env in ENVIRONMENTS if env.profile == "coreweave-ib")
    choice = fabric_of(gpu_job("RDMA", profile=OWN), cluster_of(env.nodes()))
    assert choice == ChosenFabric(OWN, "GPUDirect", {})


def test_pods_on_the_host_network_find_their_coordinator() -> None:
    """Without a dnsPolicy of the template they would resolve names as their node does."""
    job = gpu_job(hostNetwork=True)
    spec = children.worker(job, 0, 1, key_id=KEY)["spec"]
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    job = gpu_job(hostNetwork=True, dnsPolicy="None", dnsConfig={"nameservers": ["10.0.0.10"]})
    assert children.worker(job, 0, 1, key_id=KEY)["spec"]["dnsPolicy"] == "None"
    assert "dnsPolicy" not in children.worker(gpu_job(), 0, 1, key_id=KEY)["spec"]
