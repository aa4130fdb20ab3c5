"""A sidecar that outlives its trainer does not hold the GPU of its pod forever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs
from paceline_api.times import timestamp
from paceline_operator.cluster.wire import PodObject, pod_of
from paceline_operator.core.changes import Changes
from paceline_operator.core.decide.backoff import NOTE_SLOT_FAILURES, SIDECAR_S
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed, Pod, Sent
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import COORDINATOR, NOW, UID, job_of, training
from testing.fake_cluster.observations import RUNNING as TRAINING

RUNNING = {"name": "logger", "state": {"running": {"startedAt": timestamp(NOW - 600)}}}
GONE = {"name": "logger", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
KINDS = {"plain": "containerStatuses", "native": "initContainerStatuses"}
"""The list in which a kubelet reports a sidecar: a native one is an init container that is
restarted."""


def ended(
    kind: str, slot: int, code: int, words: str, *, attempt: int = 1, logger: Any = RUNNING
) -> Pod:
    """Return a worker whose trainer has just ended, as a kubelet describes it."""
    over = logger is GONE
    done = {"exitCode": code, "message": words, "finishedAt": timestamp(NOW)}
    status: dict[str, Any] = {
        "phase": "Running" if not over else "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": done}}],
    }
    status[KINDS[kind]] = [*status.get(KINDS[kind], ()), logger]
    labels = {
        "paceline.dev/job-name": "digits",
        "paceline.dev/role": "worker",
        "paceline.dev/slot": str(slot),
        "paceline.dev/attempt": str(attempt),
    }
    name = f"digits-{slot}-{attempt}"
    metadata = {
        "name": name,
        "uid": f"pod-{slot}-{attempt}",
        "labels": labels,
        "ownerReferences": [{"uid": UID, "controller": True}],
        "creationTimestamp": timestamp(NOW - 60),
    }
    body = {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status}
    parsed = pod_of(msgspec.convert(body, PodObject), NOW)
    assert parsed is not None
    assert parsed[2].ended, "its ranks are dead, whatever else runs"
    return parsed[2]


def deleted(changes: Changes) -> list[str]:
    return [deletion.name for deletion in changes.delete]


def beside(pod: Pod, count: int = 3) -> Observed:
    """Return an observation of this pod among others that train."""
    observed = training(count)
    others = tuple(p for p in observed.pods if not p.is_worker or p.slot != pod.slot)
    return replace(observed, pods=(*others, pod), coordinator_heard_s=NOW + 60)


# ---- after the end ----------------------------------------------------------------------------


def complete(**spec: Any) -> JobObject:
    status = {
        "completionTime": timestamp(NOW),
        "conditions": [{"type": "Complete", "status": "True", "reason": "JobFinished"}],
    }
    return job_of(status, **spec)


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_end_a_sidecar_is_deleted_after_a_grace_period(kind: str) -> None:
    observed = Observed(pods=(ended(kind, 0, 0, "finished"), COORDINATOR))
    first = reconcile(complete(), observed, NOW + 1)
    assert deleted(first) == ["digits-coordinator-1"]
    assert first.look_again_s == NOW + SIDECAR_S
    assert deleted(reconcile(complete(), observed, NOW + SIDECAR_S)) == [
        "digits-0-1",
        "digits-coordinator-1",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_end_a_terminated_pod_is_kept_for_its_logs(kind: str) -> None:
    observed = Observed(pods=(ended(kind, 0, 0, "finished", logger=GONE),))
    assert deleted(reconcile(complete(), observed, NOW + 3600)) == []


def test_clean_pod_policy_none_keeps_all_pods() -> None:
    observed = Observed(pods=(ended("plain", 0, 0, "finished"),))
    job = complete(cleanPodPolicy="None")
    assert deleted(reconcile(job, observed, NOW + 3600)) == []


def test_clean_pod_policy_all_deletes_ended_pods_at_once() -> None:
    observed = Observed(pods=(ended("plain", 0, 0, "finished", logger=GONE),))
    job = complete(cleanPodPolicy="All")
    assert deleted(reconcile(job, observed, NOW + 1)) == ["digits-0-1"]


def test_a_finished_job_is_deleted_after_its_ttl() -> None:
    observed = Observed(pods=(ended("plain", 0, 0, "finished", logger=GONE),))
    early = reconcile(complete(ttlSecondsAfterFinished=600), observed, NOW + 599)
    assert not early.delete_job
    assert early.look_again_s == NOW + 600
    assert reconcile(complete(ttlSecondsAfterFinished=600), observed, NOW + 600).delete_job
    assert reconcile(complete(ttlSecondsAfterFinished=0), observed, NOW).delete_job
    assert not reconcile(complete(), observed, NOW + 10**7).delete_job, "it stays without a time"


# ---- while the job runs -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_pod_is_replaced_at_once_and_its_sidecar_deleted_later(kind: str) -> None:
    job = job_of(TRAINING, replicas=3)
    failed = ended(kind, 1, 1, "failed: out of data")
    first = reconcile(job, beside(failed), NOW)
    assert [create.name for create in first.workers] == ["digits-1-2"]
    assert deleted(first) == [], "its sidecar may have something to say"
    later = reconcile(job, beside(failed), NOW + SIDECAR_S)
    assert [create.name for create in later.workers] == ["digits-1-2"]
    assert deleted(later) == ["digits-1-1"]
    over = ended(kind, 1, 1, "failed: out of data", logger=GONE)
    assert deleted(reconcile(job, beside(over), NOW + 3600)) == [], "it holds nothing"


def test_a_failed_pod_is_kept_while_its_slot_backs_off() -> None:
    """A deleted pod is no failure, so the pod stays while its slot waits."""
    notes = {NOTE_SLOT_FAILURES: "5"}
    failed = replace(ended("plain", 1, 1, "failed: out of data"), notes=notes)
    waits = reconcile(job_of(TRAINING, replicas=3), beside(failed), NOW + SIDECAR_S)
    assert waits.workers == ()
    assert deleted(waits) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_drained_worker_with_a_sidecar_is_deleted(kind: str) -> None:
    drained = ended(kind, 2, 0, "drained: scaled down")
    job = job_of(TRAINING, replicas=2)
    observed = beside(drained)
    assert observed.coordinator is not None
    ranks = tuple(rank for rank in observed.coordinator.ranks if rank.member.slot != 2)
    observed = replace(observed, coordinator=structs.replace(observed.coordinator, ranks=ranks))
    first = reconcile(job, observed, NOW)
    assert deleted(first) == []
    assert first.look_again_s is not None
    assert first.look_again_s <= NOW + SIDECAR_S
    assert deleted(reconcile(job, observed, NOW + SIDECAR_S)) == ["digits-2-1"]


def test_a_released_pod_is_not_deleted_before_the_end() -> None:
    """The other ranks finish, and their coordinator may be lost before it reports the outcome."""
    observed = beside(ended("plain", 1, 0, "finished"))
    assert observed.coordinator is not None
    observed = replace(observed, coordinator=structs.replace(observed.coordinator, stopping=True))
    assert deleted(reconcile(job_of(TRAINING, replicas=3), observed, NOW + 600)) == []


def test_a_sidecar_named_coordinator_is_not_taken_for_the_trainer() -> None:
    """A kubelet sorts the statuses by name, so that of the sidecar comes first."""
    done = {"exitCode": 0, "reason": "Completed"}
    sidecar = {"name": "coordinator", "state": {"terminated": done}}
    trainer = {"name": "trainer", "state": {"running": {}}}
    labels = {"paceline.dev/job-name": "digits", "paceline.dev/role": "worker"}
    status = {"phase": "Running", "containerStatuses": [sidecar, trainer]}
    body = {"metadata": {"name": "digits-0-1", "labels": labels}, "status": status}
    parsed = pod_of(msgspec.convert(body, PodObject), NOW)
    assert parsed is not None
    assert not parsed[2].ended


# ---- before the start -------------------------------------------------------------------------

WAITS = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
NO_IMAGE = {"reason": "ErrImagePull", "message": "logger:1 is not to be had"}


def starting(init: list[dict[str, Any]], trainer: dict[str, Any]) -> Pod:
    """Return a worker with these init containers, native sidecars among them."""
    labels = {
        "paceline.dev/job-name": "digits",
        "paceline.dev/role": "worker",
        "paceline.dev/slot": "0",
        "paceline.dev/attempt": "1",
    }
    owners = [{"uid": UID, "controller": True}]
    metadata = {"name": "digits-0-1", "uid": "pod-0-1", "labels": labels, "ownerReferences": owners}
    status = {"phase": "Pending", "initContainerStatuses": init, "containerStatuses": [trainer]}
    body = {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status}
    parsed = pod_of(msgspec.convert(body, PodObject), NOW)
    assert parsed is not None
    return parsed[2]


def degraded(pod: Pod) -> tuple[str, str, str]:
    changes = reconcile(job_of(), Observed(pods=(pod, COORDINATOR), sent=Sent(secret=True)), NOW)
    assert changes.status is not None
    conditions = [c for c in changes.status["conditions"] if c["type"] == "Degraded"]
    return (
        tuple(conditions[0][n] for n in ("status", "reason", "message"))
        if conditions
        else ("", "", "")
    )


def test_an_unpullable_native_sidecar_is_reported_like_the_trainer() -> None:
    mended = {"name": "copy", "state": {"terminated": {"exitCode": 0}}}
    stuck = {"name": "logger", "state": {"waiting": NO_IMAGE}}
    words = "digits-0-1: ErrImagePull: init container logger: logger:1 is not to be had"
    assert degraded(starting([mended, stuck], WAITS)) == ("True", "PodNotStarting", words)


def test_a_crashing_native_sidecar_is_reported_with_its_last_message() -> None:
    last = {"terminated": {"exitCode": 2, "message": "no such file: logger.yaml"}}
    waits = {"reason": "CrashLoopBackOff", "message": "back-off 40s"}
    stuck = {"name": "logger", "state": {"waiting": waits}, "lastState": last}
    words = "digits-0-1: CrashLoopBackOff: init container logger: no such file: logger.yaml"
    assert degraded(starting([stuck], WAITS)) == ("True", "PodNotStarting", words)


@pytest.mark.parametrize(
    ("init", "trainer"),
    [
        ({"state": {"running": {}}}, WAITS),
        ({"state": {"waiting": {"reason": "PodInitializing"}}}, WAITS),
        ({"state": {"waiting": NO_IMAGE}}, {"name": "trainer", "state": {"running": {}}}),
    ],
)
def test_a_starting_or_training_pod_is_not_stuck(
    init: dict[str, Any], trainer: dict[str, Any]
) -> None:
    """A sidecar that crashes later does not hold up the trainer."""
    assert degraded(starting([{"name": "logger", **init}], trainer))[0] != "True"
