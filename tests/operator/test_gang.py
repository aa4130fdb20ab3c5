"""Gangs: each provider's group object and marks on pods, and how a group follows its job."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline.environment import AgentSettings
from paceline_api.crdgen import PLURAL
from paceline_api.times import timestamp
from paceline_api.types.enums import SchedulingProvider
from paceline_operator.cluster.api import PATHS, ApiError
from paceline_operator.core.changes import Changes
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.job import JobObject, read_job
from paceline_operator.core.observed import Observed, Pod, Sent
from paceline_operator.core.pods import children
from paceline_operator.core.providers import gangs, kueue
from paceline_operator.core.providers.choice import GANGS
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.refusals import CreationRefusal, RefusalKind
from paceline_operator.core.report.refused import as_condition

from testing.fake_cluster.observations import NOW, RUNNING, UID, training, worker
from testing.fake_cluster.parts import START_S
from testing.fake_cluster.world import NAMESPACE, World, job_body

GOLDEN = Path(__file__).parent / "golden/gangs.yaml"
QUEUE = "kueue.x-k8s.io/queue-name"
VOLCANO = GANGS[SchedulingProvider.VOLCANO].api.resource
WITH_GROUP = sorted(GANGS)
UNSERVED = ApiError(404, "Not Found", "404 page not found")


def job_of(
    status: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    **spec: Any,
) -> JobObject:
    body = job_body(**spec)
    body["metadata"] |= {"uid": UID, "generation": 3, "creationTimestamp": timestamp(START_S)}
    body["metadata"] |= {"labels": labels or {}, "annotations": annotations or {}}
    body["status"] = status or {}
    return read_job(body)


def gang_of(provider: str, status: dict[str, Any] | None = None, **spec: Any) -> JobObject:
    scheduling = {"provider": provider, "gang": {}}
    return job_of(status, **{"replicas": 3, "minReplicas": 2, "scheduling": scheduling, **spec})


def queued(status: dict[str, Any] | None = None, **spec: Any) -> JobObject:
    return job_of(status, {QUEUE: "team-a"}, **{"replicas": 3, **spec})


def decided(job: JobObject, observed: Observed, now_s: float = NOW) -> Changes:
    changes = reconcile(job, observed, now_s)
    assert reconcile(job, observed, now_s) == changes, "the same facts give the same answer"
    return changes


def condition(changes: Changes, kind: str) -> dict[str, Any]:
    assert changes.status is not None
    return next(c for c in changes.status["conditions"] if c["type"] == kind)


# ---- manifests ----------------------------------------------------------------------------------


def added(plain: Any, marked: Any) -> Any:
    """Return what stands in `marked` and not in `plain`."""
    if isinstance(plain, list):
        known = {item.get("name"): item for item in plain}
        return [added(known.get(item.get("name")), item) for item in marked if item not in plain]
    if not isinstance(plain, dict):
        return marked
    return {
        key: added(plain.get(key), value)
        for key, value in marked.items()
        if value != plain.get(key)
    }


def first_pod(**spec: Any) -> dict[str, Any]:
    """Return the first worker of a job that names no scheduling provider."""
    return dict(decided(job_of(**spec), Observed()).workers[0].manifest)


def test_groups_and_marks_on_pods_match_the_golden_file() -> None:
    """To accept a change, delete the file, run again and read the difference."""
    entries: dict[str, Any] = {}
    for provider in ("Auto", "Native", "Kueue", "Volcano", "Coscheduling", "KAI"):
        spec: dict[str, Any] = {"replicas": 3, "scheduling": {"provider": provider, "gang": {}}}
        if provider not in ("Auto", "Kueue"):
            spec |= {"minReplicas": 2}
        spec["template"] = copy.deepcopy(job_body()["spec"]["template"])
        spec["template"]["spec"]["priorityClassName"] = "high"
        labels = {QUEUE: "team-a", gangs.KAI_QUEUE: "team-b", "own": "x"}
        job = job_of(None, labels, {gangs.VOLCANO_QUEUE: "team-c"}, **spec)
        assert not job.problems, job.problems
        changes = decided(job, Observed())
        made = changes.workers[0].manifest
        plain = first_pod(replicas=3, template=spec["template"])
        entry: dict[str, Any] = {"pod": added(plain, made)}
        if (group := changes.beside.group) is not None:
            entry |= {"at": PATHS[group.kind], "group": dict(group.manifest)}
        entries[provider] = entry
    text = yaml.safe_dump(entries, sort_keys=True, width=100)
    if not GOLDEN.exists():
        GOLDEN.write_text(text)
        pytest.fail(f"{GOLDEN.name} was missing and has been written; read it and run again")
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("provider", WITH_GROUP)
def test_the_coordinator_is_not_part_of_the_gang(provider: str) -> None:
    job = gang_of(provider)
    changes = decided(job, Observed())
    assert changes.coordinator is not None
    assert changes.coordinator.manifest == children.coordinator(job, 1, key_id="")


def test_scheduler_and_queue_of_the_template_are_kept() -> None:
    template = copy.deepcopy(job_body()["spec"]["template"])
    template["spec"]["schedulerName"] = "mine"
    template["metadata"] = {"labels": {gangs.KAI_QUEUE: "ours"}}
    changes = decided(gang_of("KAI", template=template), Observed())
    assert changes.workers[0].manifest["spec"]["schedulerName"] == "mine"
    assert changes.workers[0].manifest["metadata"]["labels"][gangs.KAI_QUEUE] == "ours"
    assert changes.beside.group is not None
    assert changes.beside.group.manifest["spec"]["queue"] == "ours"


@pytest.mark.parametrize("scheduling", [{}, {"provider": "None"}, {"provider": "Auto"}])
def test_a_job_without_a_provider_has_plain_pods(scheduling: dict[str, Any]) -> None:
    job = job_of(scheduling=scheduling)
    changes = decided(job, Observed())
    assert changes.beside.group is None
    assert changes.beside.budget is None
    assert changes.workers[0].manifest == first_pod()


def test_a_scheduler_without_a_gang_gets_no_group() -> None:
    job = job_of(scheduling={"provider": "Volcano"})
    changes = decided(job, Observed())
    assert changes.beside.group is None
    assert added(first_pod(), changes.workers[0].manifest) == {"spec": {"schedulerName": "volcano"}}


@pytest.mark.parametrize(
    ("labels", "scheduling", "problem"),
    [
        ({}, {"gang": {}}, "spec.scheduling.gang: has no effect without a provider"),
        ({}, {"gang": {}, "provider": "Auto"}, "give the job Kueue's queue label"),
        ({QUEUE: "a"}, {"gang": {}, "provider": "None"}, "or remove gang"),
        ({QUEUE: "a"}, {"gang": {"minCount": 1}}, "Kueue admits all or none"),
        ({QUEUE: "a"}, {"gang": {"minCount": 2}}, ""),
        ({QUEUE: "a"}, {"gang": {}}, ""),
    ],
)
def test_problems_that_depend_on_labels_are_found_by_the_operator(
    labels: dict[str, str], scheduling: dict[str, Any], problem: str
) -> None:
    """The validation rules of the API server cannot see labels."""
    job = job_of(None, labels, replicas=2, scheduling=scheduling)
    assert problem in job.problems
    assert bool(job.problems) == bool(problem)


# ---- the group follows the job ------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def submit(world: World, **spec: Any) -> None:
    scheduling = {"provider": "Volcano", "gang": {}}
    spec = {"replicas": 3, "minReplicas": 2, "scheduling": scheduling, **spec}
    world.server.insert(PLURAL, NAMESPACE, job_body(**spec))


def writes(world: World, kind: str = VOLCANO) -> list[int]:
    """Return the positions of the operator's writes; each begins with a look at the owner."""
    return [n for n, text in enumerate(world.server.writes) if text.startswith(f"GET {kind} ")]


def holds(world: World, kind: str) -> dict[str, Any] | None:
    status = world.server.find(PLURAL, NAMESPACE, "digits").get("status", {})
    return next(
        (c for c in status.get("conditions", []) if c["type"] == kind and c["status"] == "True"),
        None,
    )


def minimum(world: World) -> int:
    (group,) = world.server.of_kind(VOLCANO)
    return int(group["spec"]["minMember"])


def test_the_group_is_created_before_the_first_pod_with_two_requests(world: World) -> None:
    submit(world)
    world.settle(10, step_s=0.1)
    assert holds(world, "RingReady")
    assert writes(world) == [0]
    assert world.server.requests.total() <= 3 + 7 + 2, world.server.writes


def test_the_group_changes_with_the_job_and_only_then(world: World) -> None:
    submit(world)
    world.settle(5)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"minReplicas": 3})
    world.settle(5)
    assert minimum(world) == 3
    scheduling = {"provider": "Volcano", "gang": {"minCount": 1}}
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"scheduling": scheduling})
    world.settle(5)
    assert minimum(world) == 1
    world.server.change(
        PLURAL, NAMESPACE, "digits", spec={"replicas": 3, "ttlSecondsAfterFinished": 9}
    )
    world.settle(5)
    assert len(writes(world)) == 3


def test_pods_created_later_join_the_same_group(world: World) -> None:
    submit(world, checkpoint={"path": "/c"})
    world.settle(5)
    world.server.remove("pods", NAMESPACE, "digits-1-1")
    world.settle(5)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"replicas": 5})
    world.settle(5)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": True})
    world.settle(30)
    assert world.pods() == []
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": False, "replicas": 2})
    world.settle(30)
    assert holds(world, "RingReady")
    groups = {pod["metadata"]["annotations"][gangs.VOLCANO_GROUP] for pod in world.pods()}
    (group,) = world.server.of_kind(VOLCANO)
    assert groups == {group["metadata"]["name"]}
    assert len(world.pods()) == 2


def test_the_group_is_deleted_with_its_job(world: World) -> None:
    submit(world)
    world.settle(5)
    world.server.remove(PLURAL, NAMESPACE, "digits")
    world.settle(30)
    assert world.server.of_kind(VOLCANO) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UNSERVED, ("does not serve podgroups.scheduling.volcano.sh", "install Volcano")),
        (
            ApiError(403, "Forbidden", 'User "o" cannot create resource "podgroups"'),
            ("cannot create", "rbac.gangs: true"),
        ),
        (
            ApiError(403, "Forbidden", "exceeded quota: groups"),
            ("exceeded quota: groups", "correct what it names"),
        ),
        (ApiError(422, "Invalid", "queue is closed"), ("queue is closed", "correct what it names")),
    ],
)
def test_a_group_that_cannot_be_created_is_reported_and_retried(
    world: World, error: ApiError, words: tuple[str, ...]
) -> None:
    world.server.refusing[VOLCANO] = error
    submit(world)
    world.settle(120)
    assert world.server.of_kind("pods") == []
    assert world.server.of_kind("secrets") == []
    degraded = holds(world, "Degraded")
    assert degraded is not None
    assert degraded["reason"] == "SchedulerUnavailable"
    for word in words:
        assert word in degraded["message"]
    assert 5 <= len(writes(world)) <= 9, "with growing pauses"
    world.server.refusing.clear()
    world.settle(90)
    assert holds(world, "RingReady")
    assert holds(world, "Degraded") is None


def test_a_long_wait_causes_no_immediate_reconcile() -> None:
    """A gang may wait for hours, and its coordinator does not answer until then."""
    refusal = CreationRefusal(RefusalKind.NO_GANG_API, "404 page not found", NOW, count=7)
    observed = Observed(refusal=refusal, clocks=Clocks(coordinator_away_s=NOW - 3600))
    changes = decided(gang_of("Volcano"), observed)
    assert changes.look_again_s == NOW + 60
    pods = tuple(replace(worker(n), node="", phase="Pending") for n in range(3))
    later = decided(
        gang_of("Volcano"), Observed(pods=pods, clocks=Clocks(coordinator_away_s=NOW - 3600))
    )
    assert later.look_again_s is None or later.look_again_s > NOW


def test_a_new_operator_writes_the_group_once(world: World) -> None:
    submit(world)
    world.settle(5)
    world.start_operator()
    world.settle(20)
    assert len(writes(world)) == 2


# ---- Kueue --------------------------------------------------------------------------------------

NOTE = {kueue.NOTE: "digits-job-uid-1/3"}


def member(slot: int, **fields: Any) -> Pod:
    return worker(slot, notes=NOTE, **{"queued": True, **fields})


def in_queue(*pods: Pod, **fields: Any) -> Observed:
    base = training(0)
    return replace(base, pods=(*pods, *base.pods), sent=Sent(secret=True), **fields)


def test_a_queued_job_gets_all_workers_at_once_and_no_coordinator() -> None:
    changes = decided(queued(), Observed())
    assert len(changes.workers) == 3
    assert changes.coordinator is None
    assert changes.beside.group is None
    gated = replace(member(0), node="", phase="Pending", unschedulable="SchedulingGated")
    waiting = decided(queued(), Observed(pods=tuple(replace(gated, slot=n) for n in range(3))))
    assert waiting.coordinator is None
    assert condition(waiting, "Scheduled")["reason"] == "Queued"
    assert "team-a" in condition(waiting, "Scheduled")["message"]
    admitted = decided(queued(), Observed(pods=(member(0), *(member(n) for n in (1, 2)))))
    assert admitted.coordinator is not None


@pytest.mark.parametrize(
    ("old", "replaced"),
    [
        (member(1, deleting=True), False),
        (member(1, deleting=True, phase="Succeeded"), False),
        (member(1, deleting=True, phase="Failed"), True),
        (member(1, deleting=True, node="", phase="Pending"), True),
    ],
)
def test_a_replacement_is_created_when_kueue_has_room_for_it(old: Pod, replaced: bool) -> None:
    changes = decided(queued(RUNNING), in_queue(member(0), old, member(2)))
    assert [c.name for c in changes.workers] == (["digits-1-2"] if replaced else [])
    if replaced:
        notes = changes.workers[0].manifest["metadata"]["annotations"]
        assert notes[kueue.NOTE] == NOTE[kueue.NOTE], "it joins the group of the others"


def test_an_evicted_agent_exits_with_the_drained_code() -> None:
    pod = decided(queued(), Observed()).workers[0].manifest
    env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
    filled = {name: value or "filled-in" for name, value in env.items()}
    assert AgentSettings.from_environment(filled).drained_exit_code == kueue.DRAINED_EXIT


def test_a_kueue_group_does_not_grow() -> None:
    changes = decided(queued(RUNNING, replicas=5), in_queue(*(member(n) for n in range(3))))
    assert changes.workers == ()
    assert "suspend and resume" in condition(changes, "Resizing")["message"]


def test_a_job_that_lost_all_pods_gets_a_new_group() -> None:
    status = {**RUNNING, "highestAttempt": 4}
    job = queued(status, checkpoint={"path": "/c"})
    old = [member(n, deleting=True) for n in range(3)]
    clocks = Clocks(nobody_s=NOW - 60)
    changes = decided(job, in_queue(*old, clocks=clocks, coordinator=None))
    labels = [c.manifest["metadata"]["labels"][kueue.GROUP] for c in changes.workers]
    assert labels == ["digits-job-uid-5"] * 3


def test_a_kueue_that_ignores_pods_is_reported() -> None:
    pods = [member(0), member(1), member(2, queued=False)]
    changes = decided(queued(RUNNING), in_queue(*pods))
    assert condition(changes, "Degraded")["reason"] == "SchedulerUnavailable"
    assert "integration `pod`" in condition(changes, "Degraded")["message"]


def test_each_provider_has_a_message_for_a_missing_api() -> None:
    for provider in WITH_GROUP:
        refusal = CreationRefusal(RefusalKind.NO_GANG_API, "404 page not found", NOW)
        _, text = as_condition(gang_of(provider), refusal) or ("", "")
        assert GANGS[SchedulingProvider(provider)].api.version in text
        assert "provider: None" in text
