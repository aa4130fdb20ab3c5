"""The coordinator's own pod: where it may run, and what is reported when it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from paceline_operator.core.changes import Changes
from paceline_operator.core.decide import backoff
from paceline_operator.core.observed import NOT_STARTED, End, Observed, Pod, Sent
from paceline_operator.core.pods import children
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import COORDINATOR, NOW, RUNNING, job_of, training, worker
from testing.fake_cluster.parts import KEY, job_body

ON_GPUS = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [
            {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["jobs"]}]}
        ]
    }
}
APART = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {}, "topologyKey": "kubernetes.io/hostname"}
    ]
}


def condition(changes: Changes, kind: str) -> dict[str, Any]:
    assert changes.status is not None
    return next(c for c in changes.status["conditions"] if c["type"] == kind)


def with_coordinator(*pods: Pod) -> Observed:
    return Observed(pods=(worker(0), worker(1), *pods), sent=Sent(secret=True))


@pytest.mark.parametrize("words", ["ErrImagePull: no such image", "CrashLoopBackOff: no module"])
def test_a_coordinator_that_cannot_start_is_reported_like_a_worker(words: str) -> None:
    pod = replace(COORDINATOR, phase="Pending", waiting=words, created_s=NOW)
    degraded = condition(reconcile(job_of(), with_coordinator(pod), NOW), "Degraded")
    assert degraded["reason"] == "PodNotStarting"
    assert degraded["message"] == f"digits-coordinator-1: {words}"


def test_an_unschedulable_coordinator_quotes_the_scheduler() -> None:
    words = "0/3 nodes are available: 3 Insufficient cpu"
    pod = replace(COORDINATOR, phase="Pending", node="", unschedulable=words)
    changes = reconcile(job_of(), with_coordinator(pod), NOW)
    scheduled = condition(changes, "Scheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert scheduled["message"] == f"digits-coordinator-1: {words}"
    placed = reconcile(job_of(), with_coordinator(COORDINATOR), NOW)
    assert condition(placed, "Scheduled")["status"] == "True"


# ---- refused by its node ------------------------------------------------------------------------


def refused(attempt: int, **fields: Any) -> Pod:
    base = replace(
        COORDINATOR,
        name=f"digits-coordinator-{attempt}",
        uid=f"coordinator-{attempt}",
        attempt=attempt,
        phase="Failed",
        end=End(NOT_STARTED, "OutOfcpu", "Node didn't have enough resource: cpu"),
        ended_seen_s=NOW,
        created_s=NOW - 1,
    )
    return replace(base, **fields)


def test_a_coordinator_refused_by_its_node_is_recreated_after_a_pause() -> None:
    """Without the pause a node that refuses it would be asked without end."""
    job, seen = job_of(), with_coordinator(refused(1))
    first = reconcile(job, seen, NOW)
    assert first.coordinator is not None, "nothing after the first refusal"
    notes = first.coordinator.manifest["metadata"]["annotations"]
    assert notes[backoff.NOTE_SLOT_FAILURES] == "1"
    again = with_coordinator(refused(1), refused(2, notes={backoff.NOTE_SLOT_FAILURES: "1"}))
    waits = reconcile(job, again, NOW)
    assert waits.coordinator is None
    degraded = condition(waits, "Degraded")
    assert degraded["reason"] == "PodNotStarting"
    assert "digits-coordinator-2 was refused by its node" in degraded["message"]
    assert "enough resource: cpu" in degraded["message"]
    assert waits.look_again_s is not None
    later = reconcile(job, again, waits.look_again_s)
    assert later.coordinator is not None
    assert later.coordinator.name == "digits-coordinator-3"


def test_an_evicted_coordinator_is_recreated_at_once() -> None:
    evicted = refused(2, end=End(137, "Evicted"), notes={backoff.NOTE_SLOT_FAILURES: "5"})
    changes = reconcile(job_of(RUNNING), with_coordinator(evicted), NOW)
    assert changes.coordinator is not None


def test_only_the_last_ended_coordinators_are_kept() -> None:
    old = [refused(attempt, ended_seen_s=NOW - 90) for attempt in range(1, 7)]
    present = replace(COORDINATOR, attempt=7, name="digits-coordinator-7")
    seen = training(3)
    workers = tuple(pod for pod in seen.pods if pod.is_worker)
    changes = reconcile(
        job_of(RUNNING, replicas=3), replace(seen, pods=(*workers, *old, present)), NOW
    )
    gone = sorted(deletion.name for deletion in changes.delete)
    assert gone == [f"digits-coordinator-{n}" for n in range(1, 7 - backoff.KEPT)]


# ---- settings inherited from the worker's template ----------------------------------------------


def spec_of(template: dict[str, Any], **coordinator: Any) -> dict[str, Any]:
    spec = job_body()["spec"]["template"]["spec"] | template
    job = job_of(template={"spec": spec}, **({"coordinator": coordinator} if coordinator else {}))
    assert not job.problems, job.problems
    made: dict[str, Any] = children.coordinator(job, 1, key_id=KEY)["spec"]
    return made


def test_the_coordinator_has_the_template_service_account_without_a_token() -> None:
    made = spec_of({"serviceAccountName": "trainer"})
    assert made["serviceAccountName"] == "trainer"
    assert made["automountServiceAccountToken"] is False, "the secrets, not the rights"


def test_the_coordinator_inherits_only_the_node_affinity() -> None:
    affinity = {"nodeAffinity": ON_GPUS, "podAntiAffinity": APART, "podAffinity": APART}
    assert spec_of({"affinity": affinity})["affinity"] == {"nodeAffinity": ON_GPUS}
    assert "affinity" not in spec_of({"affinity": {"podAntiAffinity": APART}})


@pytest.mark.parametrize(
    "own", [{"nodeSelector": {"pool": "small"}}, {"affinity": {"podAffinity": APART}}]
)
def test_a_placement_of_its_own_replaces_the_inherited_affinity(own: dict[str, Any]) -> None:
    made = spec_of({"affinity": {"nodeAffinity": ON_GPUS}}, **own)
    assert made.get("affinity") == own.get("affinity")


def test_its_own_priority_tolerations_and_resources_win() -> None:
    tolerated = [{"key": "small", "operator": "Exists"}]
    room = {"limits": {"memory": "1Gi"}, "requests": {"cpu": "100m"}}
    template = {
        "priorityClassName": "low",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    own = {"priorityClassName": "high", "tolerations": tolerated, "resources": room}
    made = spec_of(template, **own)
    assert (made["priorityClassName"], made["tolerations"]) == ("high", tolerated)
    assert made["containers"][0]["resources"] == room
    inherited = spec_of(template)
    assert inherited["priorityClassName"] == "low"
    assert inherited["tolerations"] == template["tolerations"]
    assert inherited["containers"][0]["resources"] == children.COORDINATOR_RESOURCES
