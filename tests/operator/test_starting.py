"""Pods that cannot start: each container that waits is told after a minute, and a bound ends it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from paceline_api.crdgen import PLURAL
from paceline_api.times import timestamp
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.wire import PodObject, last_warning, pod_of
from paceline_operator.core.changes import Changes
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.decide.starting import ASKED_MAX, WAITS_S
from paceline_operator.core.observed import Observed, Pod, Sent, Warned
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import (
    COORDINATOR,
    NOW,
    RUNNING,
    UID,
    job_of,
    training,
    worker,
)
from testing.fake_cluster.world import NAMESPACE, World, job_body

PULL = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1"'}
CONFIG = {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
CRASH = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting"}
CREATING = {"reason": "ContainerCreating"}
INITIALIZING = {"reason": "PodInitializing"}


def waiting(name: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "state": {"waiting": state}, **more}


def running(name: str) -> dict[str, Any]:
    return {"name": name, "state": {"running": {"startedAt": timestamp(NOW)}}}


def pod(
    containers: list[dict[str, Any]],
    init: list[dict[str, Any]] | None = None,
    *,
    phase: str = "Pending",
    bound_s: float = NOW,
    role: str = "worker",
) -> Pod:
    """Return a pod as its kubelet describes it."""
    labels = {"paceline.dev/job-name": "digits", "paceline.dev/role": role}
    labels |= {"paceline.dev/slot": "0", "paceline.dev/attempt": "1"}
    name = "digits-0-1" if role == "worker" else COORDINATOR.name
    metadata: dict[str, Any] = {"name": name, "uid": f"uid-{role}", "labels": labels}
    metadata["ownerReferences"] = [{"uid": UID, "controller": True}]
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(bound_s)}
    status = {
        "phase": phase,
        "conditions": [placed],
        "containerStatuses": containers,
        "initContainerStatuses": init or [],
    }
    body = {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status}
    parsed = pod_of(msgspec.convert(body, PodObject), NOW)
    assert parsed is not None
    return parsed[2]


def decided(*pods: Pod, now_s: float, **fields: Any) -> Changes:
    observed = Observed(pods=pods, sent=Sent(secret=True), **fields)
    return reconcile(job_of(replicas=1), observed, now_s)


def degraded(changes: Changes) -> tuple[str, str]:
    assert changes.status is not None
    for condition in changes.status["conditions"]:
        if condition["type"] == "Degraded" and condition["status"] == "True":
            return condition["reason"], condition["message"]
    return "", ""


def messages(changes: Changes, reason: str) -> list[str]:
    return [event.message for event in changes.events if event.reason == reason]


CASES: dict[str, tuple[Pod, str]] = {
    "the trainer": (
        pod([waiting("trainer", CONFIG)]),
        'digits-0-1: CreateContainerConfigError: secret "keys" not found',
    ),
    "a sidecar": (
        pod([waiting("logs", PULL), waiting("trainer", CREATING)]),
        'digits-0-1: ImagePullBackOff: container logs: Back-off pulling image "x:1"',
    ),
    "an init container": (
        pod([waiting("trainer", INITIALIZING)], [waiting("copy", PULL)]),
        'digits-0-1: ImagePullBackOff: init container copy: Back-off pulling image "x:1"',
    ),
    "a native sidecar that crashes": (
        pod(
            [waiting("trainer", INITIALIZING)],
            [
                waiting(
                    "logs", CRASH, lastState={"terminated": {"exitCode": 1, "message": "no config"}}
                )
            ],
        ),
        "digits-0-1: CrashLoopBackOff: init container logs: no config",
    ),
    "the coordinator": (
        pod([waiting("coordinator", PULL)], role="coordinator"),
        'digits-coordinator-1: ImagePullBackOff: Back-off pulling image "x:1"',
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_container_that_waits_for_a_minute_is_reported_by_condition_and_event(
    name: str,
) -> None:
    stuck, words = CASES[name]
    changes = decided(stuck, now_s=NOW + WAITS_S)
    assert degraded(changes) == ("PodNotStarting", words)
    assert messages(changes, "PodNotStarting") == [words]
    early = decided(stuck, now_s=NOW + WAITS_S - 1)
    assert messages(early, "PodNotStarting") == []
    assert early.look_again_s is not None
    assert early.look_again_s <= NOW + WAITS_S


def test_all_containers_that_wait_are_reported_together() -> None:
    stuck = pod([waiting("logs", CONFIG), waiting("trainer", PULL)])
    message = degraded(decided(stuck, now_s=NOW + WAITS_S))[1]
    assert "container logs: secret" in message
    assert "ImagePullBackOff: Back-off pulling" in message


def test_a_sidecar_that_never_starts_beside_ranks_that_train_is_reported() -> None:
    stuck = pod([waiting("logs", PULL), running("trainer")], phase="Running")
    first = decided(stuck, COORDINATOR, now_s=NOW)
    assert degraded(first) == ("", "")
    assert first.clocks.waits_s == {stuck.uid: NOW}
    later = decided(stuck, COORDINATOR, now_s=NOW + WAITS_S, clocks=first.clocks)
    assert degraded(later)[0] == "PodNotStarting"
    mended = pod([running("logs"), running("trainer")], phase="Running")
    assert decided(mended, now_s=NOW + 99, clocks=first.clocks).clocks.waits_s == {}


def test_pods_that_wait_for_the_same_are_reported_once() -> None:
    why = "ErrImagePull: no such image"
    pods = [worker(n, phase="Pending", bound_s=NOW, waiting=why, waits=(why,)) for n in range(9)]
    observed = Observed(pods=(*pods, COORDINATOR), sent=Sent(secret=True))
    changes = reconcile(job_of(replicas=9), observed, NOW + WAITS_S)
    names = ", ".join(f"digits-{n}-1" for n in range(4))
    assert degraded(changes)[1] == f"{names} and 5 more: {why}"
    assert len(messages(changes, "PodNotStarting")) == 1


def test_a_worker_without_a_node_is_reported_while_the_others_train() -> None:
    observed = training(2)
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    new = worker(2, node="", phase="Pending", unschedulable=words, created_s=NOW)
    observed = replace(observed, pods=(*observed.pods, new))
    job = job_of(RUNNING, replicas=3)
    assert degraded(reconcile(job, observed, NOW + 1)) == ("", "")
    changes = reconcile(job, observed, NOW + WAITS_S)
    assert degraded(changes) == ("Unschedulable", f"digits-2-1: {words}")
    assert messages(changes, "Unschedulable") == [f"digits-2-1: {words}"]
    assert changes.status is not None
    assert changes.status["state"] != "Unschedulable", "the job trains"


# ---- Events of the kubelet ----------------------------------------------------------------------

SILENT = pod([waiting("trainer", CREATING), waiting("logs", CREATING)])


def test_events_are_asked_for_where_the_kubelet_is_silent_in_the_status() -> None:
    assert decided(SILENT, now_s=NOW + WAITS_S - 1).ask_why == ()
    first = decided(SILENT, now_s=NOW + WAITS_S)
    assert first.ask_why == (SILENT.uid,)
    assert degraded(first) == ("", ""), "a large image may still be on its way"
    asked = {SILENT.uid: Warned(NOW + WAITS_S, 'FailedMount: secret "keys" not found')}
    second = decided(SILENT, now_s=NOW + WAITS_S + 1, warned=asked)
    assert second.ask_why == ()
    words = 'digits-0-1: FailedMount: secret "keys" not found'
    assert degraded(second) == ("PodNotStarting", words)
    assert messages(second, "PodNotStarting") == [words]
    assert second.look_again_s is not None
    assert decided(SILENT, now_s=NOW + 2 * WAITS_S, warned=asked).ask_why == (SILENT.uid,)


@pytest.mark.parametrize(
    "stuck",
    [
        pod([waiting("trainer", INITIALIZING)], [running("copy")]),
        pod([running("trainer"), waiting("logs", CREATING)], phase="Running"),
        pod([waiting("trainer", PULL)]),
    ],
)
def test_events_are_not_asked_for_where_something_runs_or_gives_a_reason(stuck: Pod) -> None:
    assert decided(stuck, now_s=NOW + 600).ask_why == ()


def test_events_of_few_pods_are_asked_for_at_once() -> None:
    pods = [worker(n, phase="Pending", bound_s=NOW, is_creating=True) for n in range(50)]
    observed = Observed(pods=tuple(pods), sent=Sent(secret=True))
    changes = reconcile(job_of(replicas=50), observed, NOW + WAITS_S)
    assert len(changes.ask_why) == ASKED_MAX
    assert changes.look_again_s is not None


def event(reason: str, message: str, at_s: float) -> dict[str, Any]:
    return {"reason": reason, "message": message, "lastTimestamp": timestamp(at_s)}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", ""),
        (b'{"items": [', ""),
        (b'{"items": 5}', ""),
        (b'{"items": []}', ""),
        (json.dumps({"items": [event("FailedScheduling", "x", 5)]}).encode(), ""),
        (
            json.dumps(
                {"items": [event("FailedMount", "new", 9), event("FailedMount", "old", 5)]}
            ).encode(),
            "FailedMount: new",
        ),
        (json.dumps({"items": [event("F", "x" * 9000, 1)]}).encode(), "F: " + "x" * 997),
    ],
)
def test_the_newest_warning_is_read_from_events_of_any_content(raw: bytes, text: str) -> None:
    assert last_warning(raw) == text


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def hold(world: World, seconds: float) -> None:
    """Let time pass on nodes whose kubelets start nothing."""
    until_s = world.now_s + seconds
    while world.now_s < until_s:
        for body in world.server.of_kind("pods"):
            if not body["spec"].get("nodeName"):
                placed = {
                    "type": "PodScheduled",
                    "status": "True",
                    "lastTransitionTime": timestamp(world.now_s),
                }
                name = body["metadata"]["name"]
                status = {"phase": "Pending", "conditions": [placed]}
                world.server.change(
                    "pods", NAMESPACE, name, spec={"nodeName": "node-1"}, status=status
                )
        world.deliver()
        world.work()
        world.deliver()
        world.work()
        world.now_s += 0.5


def condition(world: World, kind: str) -> dict[str, Any]:
    status = world.server.find(PLURAL, NAMESPACE, "digits").get("status", {})
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def warn(world: World, name: str, reason: str, message: str) -> None:
    uid = world.server.find("pods", NAMESPACE, name)["metadata"]["uid"]
    body = event(reason, message, world.now_s) | {
        "metadata": {"name": f"{name}.{reason}"},
        "involvedObject": {"uid": uid},
        "type": "Warning",
    }
    world.server.insert("events", NAMESPACE, body)


def test_a_volume_of_a_missing_secret_is_reported_and_cleared_once_it_is_there(
    world: World,
) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body())
    hold(world, 5)
    warn(world, "digits-0-1", "FailedMount", 'secret "keys" not found')
    hold(world, WAITS_S + 5)
    reported = condition(world, "Degraded")
    assert (reported["status"], reported["reason"]) == ("True", "PodNotStarting")
    assert reported["message"] == 'digits-0-1: FailedMount: secret "keys" not found'
    assert world.server.requests["LIST events"] <= 6, "each pod twice a minute"
    world.settle(60)
    assert condition(world, "Degraded").get("status") != "True"
    assert condition(world, "RingReady")["status"] == "True"


def test_an_operator_without_the_right_to_read_events_goes_on(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body())
    hold(world, 5)
    world.server.refusing["events"] = ApiError(403, "Forbidden", "cannot list resource")
    hold(world, WAITS_S + 5)
    world.server.refusing.clear()
    world.settle(60)
    assert condition(world, "RingReady")["status"] == "True"


# ---- the bound ----------------------------------------------------------------------------------

BOUND: dict[str, Any] = {"scheduling": {"startDeadlineSeconds": 300}}


def test_a_job_that_never_starts_fails_at_its_bound_with_what_it_waited_for(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(**BOUND))
    hold(world, 5)
    warn(world, "digits-1-1", "FailedMount", 'secret "keys" not found')
    hold(world, 290)
    assert condition(world, "Failed") == {}
    hold(world, 10)
    failed = condition(world, "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "StartDeadlineExceeded")
    assert "within 300 s" in failed["message"]
    assert 'digits-1-1: FailedMount: secret "keys" not found' in failed["message"]
    hold(world, 5)
    assert [
        p for p in world.server.of_kind("pods") if "deletionTimestamp" not in p["metadata"]
    ] == []


def test_the_bound_does_not_end_a_job_that_trains_or_is_suspended(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(**BOUND, suspend=True))
    hold(world, 400)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": False})
    hold(world, 200)
    assert condition(world, "Failed") == {}
    world.settle(400)
    assert condition(world, "RingReady")["status"] == "True"
    assert condition(world, "Failed") == {}


def test_the_bound_counts_from_a_resumption_too(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(**BOUND))
    world.settle(400)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": True})
    world.settle(400)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": False})
    hold(world, 290)
    assert condition(world, "Failed") == {}
    hold(world, 15)
    assert condition(world, "Failed")["reason"] == "StartDeadlineExceeded"


def test_the_bound_is_a_time_of_the_operators_decisions() -> None:
    job = job_of({"activeTime": timestamp(NOW)}, **BOUND)
    waits = reconcile(job, Observed(pods=(SILENT,), sent=Sent(secret=True)), NOW + 299)
    assert waits.look_again_s is not None
    assert waits.look_again_s <= NOW + 300
    clocks = Clocks()
    assert clocks.waits_s == {}
