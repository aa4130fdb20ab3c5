"""User actions on a running job: suspend, recreate, delete Secret or namespace, cut the quota."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from paceline_api.names import NOTE_FILE, NOTE_KEY, secret_name

from testing.cluster.api import ApiError
from tests.nodes.jobs import CHANGE_S, NewJob
from tests.nodes.platform import Platform

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]


def test_resuming_without_a_checkpoint_starts_from_the_beginning(new_job: NewJob) -> None:
    """The Event ProgressLost reports the lost progress."""
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    job.patch({"suspend": True})
    job.wait_condition("Suspended", CHANGE_S)
    job.until(lambda: not job.pods() and job.coordinator() is None, CHANGE_S, "without pods")
    assert "lost" in job.wait_event("ProgressLost")
    job.patch({"suspend": False})
    job.wait_trains(2)
    job.finish()


def test_resuming_continues_from_the_checkpoint_of_the_suspension(
    platform: Platform, new_job: NewJob
) -> None:
    """The job stops at an agreed round, saves it and resumes from it: each sample counts once."""
    job = new_job()
    saved = job.folder / "saved"
    saved.mkdir()
    saved.chmod(0o777)
    with claim(platform, job.namespace, saved) as name:
        # Save so rarely that the only checkpoint is the one of the suspension.
        job.apply(2, checkpoint={"path": "/saved", "claimName": name, "everyRounds": 10_000})
        job.wait_trains(2)
        before = job.watcher.version
        job.patch({"suspend": True})
        job.wait_condition("Suspended", CHANGE_S)
        job.until(lambda: not job.pods() and job.coordinator() is None, CHANGE_S, "without pods")
        (kept,) = (int(path.name[1:]) for path in saved.glob("v*"))
        assert kept >= before
        job.patch({"suspend": False})
        job.wait_trains(2)
        assert f"version {kept}" in job.wait_event("ResumedFromCheckpoint")
        assert "ProgressLost" not in {reason for reason, _ in job.events()}
        job.finish()


@contextmanager
def claim(platform: Platform, namespace: str, folder: Path) -> Iterator[str]:
    """Create a PersistentVolumeClaim bound to a folder that both nodes have."""
    volumes, name = "/api/v1/persistentvolumes", f"{namespace}-saved"
    size, how = {"storage": "1Gi"}, {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    ours = {"namespace": namespace, "name": "saved"}
    volume = {"capacity": size, "hostPath": {"path": str(folder)}, "claimRef": ours, **how}
    platform.api.create(volumes, {"metadata": {"name": name}, "spec": volume})
    wanted = {"resources": {"requests": size}, "volumeName": name, **how}
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    platform.api.create(claims, {"metadata": {"name": "saved"}, "spec": wanted})
    try:
        yield "saved"
    finally:
        platform.api.delete(f"{volumes}/{name}")


def test_a_job_recreated_under_its_name_trains_without_the_old_pods(new_job: NewJob) -> None:
    """Pods of the first job are still terminating when the second one starts."""
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    first = job.uid
    job.kubectl("delete", "tj/job", "--wait=true")
    job.apply(2)
    assert job.uid != first
    job.until(lambda: not [p for p in job.pods() if owner(p) == first], CHANGE_S, "alone")
    job.wait_trains(2)
    job.finish()


def owner(pod: dict[str, dict[str, list[dict[str, str]]]]) -> str:
    return pod["metadata"]["ownerReferences"][0]["uid"]


def test_deleting_the_namespace_removes_a_running_job(platform: Platform, new_job: NewJob) -> None:
    """Only the grace periods of its pods delay the deletion, and the operator does not fight it."""
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    pods = [*job.pods(), *job.pods("coordinator")]
    grace_s = max(pod["spec"]["terminationGracePeriodSeconds"] for pod in pods)
    path = f"/api/v1/namespaces/{job.namespace}"
    platform.api.delete(path)
    platform.api.wait_gone(path, grace_s + CHANGE_S)
    assert len(platform.operator_pods()) == 1


def test_a_job_is_degraded_while_a_quota_blocks_a_replacement(
    platform: Platform, new_job: NewJob
) -> None:
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    quotas = f"/api/v1/namespaces/{job.namespace}/resourcequotas"
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "2"}}}
    platform.api.create(quotas, quota)
    platform.api.wait(f"{quotas}/small", lambda q: "used" in q.get("status", {}), 30)
    job.kubectl("delete", "pod", "job-1-1", "--wait=false")
    condition = job.wait_condition("Degraded", CHANGE_S, "QuotaExceeded")
    assert "exceeded quota: small" in condition["message"]
    job.wait_rounds(5)  # the other rank trains on
    platform.api.patch(f"{quotas}/small", {"spec": {"hard": {"pods": "9"}}})
    job.wait_trains(2)
    job.finish()


def test_a_deleted_job_secret_is_recreated_for_new_pods(
    platform: Platform, new_job: NewJob
) -> None:
    """Running ranks do not notice; a pod that starts later finds a new Secret."""
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    coordinator = job.coordinator()
    assert coordinator is not None
    notes = coordinator["metadata"]["annotations"]
    secret = secret_name("job", job.uid, notes[NOTE_KEY], notes[NOTE_FILE])
    path = f"/api/v1/namespaces/{job.namespace}/secrets/{secret}"
    platform.api.delete(path)
    with pytest.raises(ApiError):
        platform.api.get(path)
    job.wait_rounds(5)
    job.kubectl("delete", "pod", "job-1-1", "--wait=false")
    job.until(lambda: len(job.workers()) == 2, CHANGE_S, "replaced")
    job.wait_trains(2)
    job.finish()
