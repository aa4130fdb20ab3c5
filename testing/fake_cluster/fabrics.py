"""Jobs that request devices, and nodes that offer them."""

from __future__ import annotations

from typing import Any

from paceline_operator.core.decide.fabric import NoFabric
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Node, Observed
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.fabrics import built_in

from testing.fake_cluster.observations import job_of

GPU = {"nvidia.com/gpu": 8}
IB = {"rdma/hca_shared_devices_a": 63}
NODES = {f"node-{n}": Node(f"node-{n}", offers=GPU | IB, labels={"pool": "a"}) for n in range(3)}


def gpu_job(required: str = "", profile: str = "", **template: Any) -> JobObject:
    """Return a job of two replicas with 8 GPUs each and these fabric requirements."""
    trainer = {
        "name": "trainer",
        "image": "i",
        "command": ["train"],
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    } | template.pop("trainer", {})
    asked = {"required": required, "profile": profile}
    job = job_of(
        replicas=2,
        fabric={key: value for key, value in asked.items() if value},
        template={"spec": {"containers": [trainer], **template}},
    )
    assert not job.problems, job.problems
    return job


def free(nodes: dict[str, Node] = NODES, **more: Any) -> Observed:
    """Return an observation whose built-in profiles have their required privileges removed."""
    less: dict[str, Any] = {"capabilities": None, "run_as_user": None}
    spared = {
        name: spec.model_copy(update={"pod": spec.pod and spec.pod.model_copy(update=less)})
        for name, spec in built_in().items()
    }
    return Observed(nodes=nodes, fabrics={**spared, **more})


def cluster_of(nodes: dict[str, Node] = NODES, **more: Any) -> Observed:
    """Return an observation of the nodes with the built-in profiles."""
    return Observed(nodes=nodes, fabrics={**built_in(), **more})


def name_of(choice: ChosenFabric | NoFabric) -> str:
    """Return the profile of a fabric that was found; anything else fails the test."""
    assert isinstance(choice, ChosenFabric), choice
    return choice.profile
