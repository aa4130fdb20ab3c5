"""Following the logs of a cluster job whose end and pods are reported in any order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paceline.jobs import places

from testing.jobs.scripted_server import JOBS, ScriptedServer

PODS = "/api/v1/namespaces/team/pods"
JOB = {
    "metadata": {"name": "job", "namespace": "team", "uid": "u-1", "resourceVersion": "1"},
    "spec": {"replicas": 2, "template": {"spec": {"containers": [{"name": "trainer"}]}}},
    "status": {"state": "Complete"},
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    made.answers["GET", f"{JOBS}/job"] = 200, JOB
    made.answers["GET", JOBS] = 200, {"metadata": {"resourceVersion": "1"}, "items": [JOB]}
    made.answers["WATCH", PODS] = made.answers["WATCH", JOBS] = 200, ""
    yield made
    made.close()


def pod(rank: int, phase: str, state: str) -> dict[str, Any]:
    """Build a worker pod; `state` is its container's, or "" if the node has not reported it yet."""
    name = f"job-{rank}-0"
    labels = {
        "paceline.dev/role": "worker",
        "paceline.dev/slot": str(rank),
        "paceline.dev/attempt": "0",
    }
    statuses = [{"name": "trainer", "state": {state: {}}}] if state else []
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "labels": labels,
            "ownerReferences": [{"uid": "u-1"}],
        },
        "spec": {"nodeName": "one"},
        "status": {"phase": phase, "containerStatuses": statuses},
    }


def listed(*pods: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"metadata": {"resourceVersion": "1"}, "items": list(pods)}


@pytest.mark.long
def test_following_logs_waits_for_a_pod_reported_after_the_job_ended(
    server: ScriptedServer, tmp_path: Path
) -> None:
    ended = pod(0, "Succeeded", "terminated")
    server.answers["GET", PODS] = [
        listed(ended, pod(1, "Pending", "")),
        listed(ended, pod(1, "Pending", "")),
        listed(ended, pod(1, "Succeeded", "terminated")),
    ]
    for rank in range(2):
        server.answers["GET", f"{PODS}/job-{rank}-0"] = 200, pod(rank, "Succeeded", "terminated")
        line = f"2026-01-01T00:00:0{rank}.000000000Z said by {rank}\n"
        server.answers["GET", f"{PODS}/job-{rank}-0/log"] = 200, line
    jobs = places.cluster(server.kubeconfig(tmp_path))
    followed = [line.text for line in jobs.logs("job", follow=True)]
    assert followed == ["said by 0", "said by 1"]
