"""The operator as a process against a real API server, with fake nodes."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import (
    JOBS,
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
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes


def fleet_of(plane: ControlPlane, namespace: str) -> Fleet:
    return Fleet(plane, namespace)


def _lives(plane: ControlPlane, namespace: str, pod: str) -> bool:
    return pod in living(plane, namespace)


def test_a_job_scales_replaces_workers_and_completes(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    with plane.fake_nodes(3), Fleet(plane, namespace) as fleet:
        submit(plane, namespace, replicas=4)
        until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
        assert len(living(plane, namespace)) == 4
        path = JOBS.format(namespace) + "/digits"
        plane.api.patch(f"{path}/scale", {"spec": {"replicas": 6}})
        until(lambda: job(plane, namespace)["status"]["ready"] == "6/6", "6/6")
        ring = fleet.ring()
        assert ring is not None
        assert ring.targets[-1]["replicas"] == 6

        for attempt in (2, 3, 4):
            name = f"digits-1-{attempt - 1}"
            plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")
            wanted = f"digits-1-{attempt}"
            until(partial(_lives, plane, namespace, wanted), "anew", 5)
        until(
            lambda: job(plane, namespace)["status"]["restarts"]["replicas"] == 3,
            "3 replacements are counted",
        )
        until(lambda: job(plane, namespace)["status"]["ready"] == "6/6", "6/6 again")
        change(plane, namespace, replicas=2)
        until(lambda: job(plane, namespace)["status"]["ready"] == "2/2", "2/2")
        fleet.finish()
        until(lambda: holds(job(plane, namespace), "Complete"), "Complete")
        ended = job(plane, namespace)["status"]
        assert {row["state"] for row in ended["ranks"]} == {"finished"}
        assert not ended.get("stragglers")
        assert fleet.wrong == []
        coordinator = fleet.coordinator()
        assert coordinator is None or coordinator.refused == 0
    assert running.process is not None
    assert running.process.poll() is None


def test_a_job_of_8_workers_stays_within_its_request_budget(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    """The limits are workers + 7 until the ring is ready, and workers + 12 over a whole life."""
    key = 2  # the operator looks up and creates its key once in its life
    with plane.fake_nodes(3), Fleet(plane, namespace) as fleet:
        submit(plane, namespace, replicas=8)
        until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
        ready = own_requests(plane, namespace)
        assert ready["create", "pods"] == 8 + 1
        assert ready.total() - key <= 8 + 7, ready
        fleet.finish()
        until(lambda: holds(job(plane, namespace), "Complete"), "Complete")
        until(lambda: not pods(plane, namespace, "coordinator"), "the coordinator is gone")
        life = own_requests(plane, namespace)
        assert life.total() - key <= 8 + 12, life


def test_a_bad_template_is_reported_with_the_api_server_message(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    """The first refused request is enough to report it, and no pod is created."""
    until(lambda: "acting for" in running.log.read_text(), "an operator")
    trainer = {"name": "trainer", "image": "t", "command": ["x"], "resourcess": {}}
    submit(plane, namespace, replicas=3, template={"spec": {"containers": [trainer]}})
    condition = until(lambda: holds(job(plane, namespace), "Degraded"), "Degraded")
    assert condition["reason"] == "TemplateInvalid"
    assert "resourcess" in condition["message"]
    until_quiet(lambda: own_requests(plane, namespace).total(), 2.0, 60.0, at_most=0)
    asked = own_requests(plane, namespace)
    assert asked["create", "pods"] <= 2, asked
    assert pods(plane, namespace) == []
    assert pods(plane, namespace, "coordinator") == []
    assert running.process is not None
    assert running.process.poll() is None, "the operator has ended"

    # A template may be corrected while the job is suspended.
    good = {"spec": {"containers": [{"name": "trainer", "image": "t", "command": ["x"]}]}}
    change(plane, namespace, suspend=True)
    plane.api.patch(
        f"{JOBS.format(namespace)}/digits",
        [{"op": "replace", "path": "/spec/template", "value": good}],
        "application/json-patch+json",
    )
    change(plane, namespace, suspend=False)
    until(lambda: len(living(plane, namespace)) == 3, "3 workers")
    until(lambda: not holds(job(plane, namespace), "Degraded"), "no longer degraded")


def test_an_exceeded_quota_is_reported_and_retried(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    plane.api.create(path, quota)
    until(lambda: plane.api.get(f"{path}/few").get("status", {}).get("hard"), "the quota counts")
    with plane.fake_nodes(2):
        submit(plane, namespace, replicas=4)
        condition = until(lambda: holds(job(plane, namespace), "Degraded"), "Degraded", 30)
        assert condition["reason"] == "QuotaExceeded"
        assert "exceeded quota" in condition["message"]
        plane.api.patch(f"{path}/few", {"spec": {"hard": {"pods": "10"}}})
        until(lambda: len(living(plane, namespace)) == 4, "4 workers")
        until(lambda: not holds(job(plane, namespace), "Degraded"), "no longer degraded")


@pytest.mark.exhaustive
def test_an_unreachable_coordinator_is_reported_and_the_job_completes(
    plane: ControlPlane, namespace: str, running: Running, tmp_path: Path
) -> None:
    """The ranks may still reach the coordinator; here nothing listens at its address."""
    released = {"exitCode": 0, "reason": "Completed", "message": "finished"}
    ended = {
        "phase": "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": released}}],
    }
    with plane.fake_nodes(2):
        submit(plane, namespace, replicas=2)
        condition = until(lambda: holds(job(plane, namespace), "Degraded"), "Degraded", 90)
        assert condition["reason"] == "CoordinatorAway"
        assert "connection is refused" in condition["message"]
        log = tmp_path / "operator.log"
        until(lambda: "the connection is refused" in log.read_text(), "the log says so, too")
        path = f"/api/v1/namespaces/{namespace}/pods/{living(plane, namespace)[0]}/status"
        plane.api.patch(path, {"status": ended})
        until(lambda: holds(job(plane, namespace), "Complete"), "Complete")
        assert sorted(p["metadata"]["name"] for p in pods(plane, namespace)) == [
            "digits-0-1",
            "digits-1-1",
        ]


def test_a_killed_operator_continues_where_it_was(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    until(lambda: "leading as" in running.log.read_text(), "it leads")
    running.stop(signal.SIGKILL)
    running.start("--lease-duration=300")
    until(lambda: running.log.read_text().count("leading as") == 2, "it leads again")
    running.stop(signal.SIGKILL)
    submit(plane, namespace, replicas=5)
    running.start("--lease-duration=300")  # the same identity waits for no Lease
    until(lambda: len(living(plane, namespace)) == 5, "5 workers", 60)
    assert living(plane, namespace) == [f"digits-{n}-1" for n in range(5)]
    assert running.stop() == 0
