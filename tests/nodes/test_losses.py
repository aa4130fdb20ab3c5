"""Pods and nodes are lost while a job trains: it continues, and each sample counts once."""

from __future__ import annotations

import pytest

from testing.cluster.api import Json
from testing.cluster.node import KUBELET, Node
from tests.nodes.jobs import CHANGE_S, START_S, Job, NewJob
from tests.nodes.platform import Platform

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]
NOT_READY_S = 180.0
POWER_S = 180.0
"""Covers an operator on the lost node: NotReady, its toleration, its Lease and nodeLostSeconds."""


def node_of(pod: Json | None) -> str:
    assert pod is not None
    return str(pod["spec"]["nodeName"])


def nodes_of(job: Job) -> set[str]:
    return {node_of(pod) for pod in job.workers()}


def wait_replaced(job: Job, *names: str) -> None:
    def there() -> bool:
        return [pod["metadata"]["name"] for pod in job.workers()] == list(names)

    job.until(there, CHANGE_S, f"made of {names}")


def test_a_deleted_coordinator_is_replaced_while_rounds_go_on(new_job: NewJob) -> None:
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    coordinator, pids = job.coordinator(), job.watcher.pids
    assert coordinator is not None
    job.kubectl("delete", "pod", coordinator["metadata"]["name"], "--wait=false")
    old = job.watcher.last["coordinator"]
    job.until(lambda: job.watcher.last["coordinator"] != old, CHANGE_S, "with another coordinator")
    job.wait_trains(2, timeout_s=CHANGE_S)
    assert job.watcher.pids == pids, "a rank was restarted"
    assert job.wait_event("CoordinatorAway")
    job.finish()


def test_draining_the_coordinators_node_moves_the_job(platform: Platform, new_job: NewJob) -> None:
    """The drain succeeds, and everything of the job moves to the other node."""
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    assert nodes_of(job) == {"node1", "node2"}
    node = node_of(job.coordinator())
    try:
        drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=150s")
        platform.kubectl(*drain, timeout_s=180)
        job.wait_trains(2)
        assert node not in nodes_of(job)
        assert node_of(job.coordinator()) != node
    finally:
        platform.kubectl("uncordon", node)
    job.finish()


def test_a_job_survives_the_power_loss_of_a_node(platform: Platform, new_job: NewJob) -> None:
    """Half of the ranks are gone without a message; the operator's inventory is the evidence."""
    job = new_job()
    job.apply(2, long=True)
    job.wait_trains(2)
    away = next(
        node
        for node in platform.cluster.nodes
        if node.name != node_of(job.coordinator()) and node.name in nodes_of(job)
    )
    lost = next(p["metadata"]["name"] for p in job.workers() if node_of(p) == away.name)
    try:
        away.power_off()
        job.until(
            lambda: lost not in [pod["metadata"]["name"] for pod in job.workers()],
            POWER_S,
            "replaced",
        )
        job.wait_trains(2)
        assert away.name not in nodes_of(job)
    finally:
        platform.cluster.restart(away)
    job.finish()


def test_no_sample_counts_twice_while_a_node_is_not_ready(
    platform: Platform, new_job: NewJob
) -> None:
    """The kubelet stops and its pods run on, so the cluster cannot tell which ranks are alive."""
    job = new_job()
    job.apply(2, long=True)
    job.wait_trains(2)
    node = platform.cluster.node(
        next(n for n in sorted(nodes_of(job)) if n != node_of(job.coordinator()))
    )
    try:
        node.programs[KUBELET].stop()
        wait_ready(platform, node, "Unknown")
        job.wait_rounds(10)
    finally:
        node.programs[KUBELET].start()
        wait_ready(platform, node, "True")
    job.wait_trains(2, timeout_s=START_S)
    # The rank on that node lived on; its pod ends when the kubelet learns of its deletion.
    job.finish(publisher_stays=False)


def wait_ready(platform: Platform, node: Node, status: str) -> None:
    def ready(body: Json) -> bool:
        conditions = body["status"]["conditions"]
        return any(c["type"] == "Ready" and c["status"] == status for c in conditions)

    platform.api.wait(f"/api/v1/nodes/{node.name}", ready, NOT_READY_S, f"Ready={status}")
