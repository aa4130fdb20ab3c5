"""A fabric profile reaches real pods, and preflight notices that its network is missing."""

from __future__ import annotations

import pytest

from tests.nodes.jobs import CHANGE_S, NewJob
from tests.nodes.platform import Platform

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]
PROFILES = "/apis/paceline.dev/v1alpha1/fabricprofiles"
IPC_LOCK = 1 << 14
PROFILE = {
    "apiVersion": "paceline.dev/v1alpha1",
    "kind": "FabricProfile",
    "metadata": {"name": "as-if-rdma"},
    "spec": {
        "carries": "RDMA",
        "pod": {
            "capabilities": ["IPC_LOCK"],
            "runAsUser": 0,
            "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
        },
    },
}


def test_pods_get_the_profile_and_preflight_fails_without_rdma(
    platform: Platform, new_job: NewJob
) -> None:
    """The capability is effective, which needs root, and all others are dropped."""
    platform.api.create(PROFILES, PROFILE)
    try:
        job = new_job()
        fabric = {"profile": "as-if-rdma", "required": "RDMA", "preflight": {"timeoutSeconds": 15}}
        job.apply(2, fabric=fabric)
        job.wait_trains(2)
        (name, _) = (pod["metadata"]["name"] for pod in job.workers())
        script = "grep CapEff /proc/self/status; echo $NCCL_IB_HCA"
        capabilities, variable = job.kubectl("exec", name, "--", "sh", "-c", script).splitlines()
        assert int(capabilities.split()[1], 16) == IPC_LOCK
        assert variable == "mlx5"
        job.wait_condition("Failed", CHANGE_S, "PreflightFailed")
    finally:
        platform.api.delete(f"{PROFILES}/as-if-rdma")
