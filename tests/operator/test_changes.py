"""What a change of each field of a TrainingJob does, as `paceline_api.fields.ACTS` promises it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from paceline_api.crdgen import PLURAL
from paceline_api.fields import ACTS, Acts, value_at
from paceline_api.membership import MembershipSettings
from paceline_api.names import NOTE_FILE, NOTE_KEY, NOTE_REVISION
from paceline_api.rounds import RoundSettings
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed
from paceline_operator.core.pods import children
from paceline_operator.core.pods.frozen import file_id, job_file
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import NOW, RUNNING, job_of, training
from testing.fake_cluster.world import NAMESPACE, World, job_body
from testing.field_changes import CHANGES, spec_with, template

BESIDE_RESOLVED = ("template", "replicas", "minReplicas", "maxReplicas", "suspend")
"""Fields that `status.resolved` does not show."""
OF_PODS = (Acts.NEXT_ATTEMPT, Acts.AFTER_SUSPENSION)
FIELDS = sorted(path for path in ACTS if not path.startswith("runtimeRef."))
"""Fields of a job as it is merged with its runtime (tests/operator/test_runtimes.py)."""
SHOWN = [path for path in FIELDS if path not in (*BESIDE_RESOLVED, "scheduling.gang")]


def stored(job: JobObject) -> dict[str, Any]:
    """Return the status of a job as the operator has written it."""
    return {**RUNNING, "resolved": job.resolved, "explicit": list(job.explicit)}


def before_and_after(path: str) -> tuple[JobObject, JobObject]:
    """Return a running job before and after the change of a field."""
    first = job_of(dict(RUNNING), **spec_with(path, CHANGES[path].first))
    second = job_of(stored(first), **spec_with(path, CHANGES[path].second))
    assert not first.problems, first.problems
    assert not second.problems, second.problems
    return first, second


def test_every_field_has_a_change() -> None:
    assert CHANGES.keys() == ACTS.keys()


@pytest.mark.parametrize("path", SHOWN)
def test_the_resolved_settings_follow_a_change_and_its_removal(path: str) -> None:
    first, second = before_and_after(path)
    assert value_at(first.resolved, path) == CHANGES[path].first
    assert value_at(second.resolved, path) == CHANGES[path].second
    if ACTS[path] is not Acts.NEVER and path != "collective.deadline":  # whose mode needs it
        needs = spec_with(path, None)
        never_set = job_of(dict(RUNNING), **needs)
        removed = job_of(stored(second), **needs)
        assert value_at(removed.resolved, path) == value_at(never_set.resolved, path)
        assert removed.settings == never_set.settings


@pytest.mark.parametrize("path", FIELDS)
def test_only_what_acts_after_a_suspension_belongs_to_the_revision(path: str) -> None:
    """A running job is stopped for another revision, so nothing else may change it."""
    first, second = before_and_after(path)
    assert (first.revision != second.revision) == (ACTS[path] is Acts.AFTER_SUSPENSION)


@pytest.mark.parametrize("path", [path for path in FIELDS if ACTS[path] in OF_PODS])
def test_manifests_contain_what_acts_on_later_pods(path: str) -> None:
    if path == "scheduling.gang":
        return  # tests/operator/test_gang.py has the marks of the pods of a gang
    first, second = before_and_after(path)
    assert made_of(first) != made_of(second)


def made_of(job: JobObject) -> list[Any]:
    """Return what the pods of a job get, without the digests."""
    how: dict[str, Any] = {"key_id": "", "file": "x"}
    pods = [children.worker(job, 0, 1, **how), children.coordinator(job, 1, **how)]
    for pod in pods:
        for note in (NOTE_FILE, NOTE_REVISION, NOTE_KEY):
            pod["metadata"]["annotations"].pop(note)
    return [*pods, json.loads(job_file(job))]


def test_a_default_of_the_first_release_stays_in_force() -> None:
    """A field that a user sets and removes again has the default of the present release."""
    first = job_of(dict(RUNNING))
    old = {**stored(first), "resolved": {**first.resolved, "backoffLimit": 99}}
    assert job_of(old).resolved["backoffLimit"] == 99
    written = job_of(old, backoffLimit=3)
    assert job_of(stored(written)).resolved["backoffLimit"] == 6


def test_the_number_of_ranks_follows_the_gpus_of_the_template() -> None:
    def gpus(count: int) -> dict[str, Any]:
        return template(resources={"limits": {"nvidia.com/gpu": count}})

    first = job_of(dict(RUNNING), template=gpus(2))
    second = job_of(stored(first), template=gpus(4))
    assert second.settings is not None
    assert second.settings.procs_per_replica == 4
    assert second.resolved["procsPerReplica"] == 4
    (trainer,) = children.worker(second, 0, 1, key_id="")["spec"]["containers"]
    assert {"name": "PACELINE_PROCS", "value": "4"} in trainer["env"]


def test_pods_of_a_running_job_share_its_first_job_file() -> None:
    """The ranks of a job agree on what is in it, such as the number of slots of a script."""
    started = job_of(dict(RUNNING), replicas=2)
    scaled = job_of(stored(started), replicas=4, collective={"mode": "Full"})
    assert file_id(scaled) != file_id(started)
    notes = {NOTE_FILE: file_id(started), NOTE_REVISION: started.revision}
    observed = training(2)
    observed = replace(observed, pods=tuple(replace(pod, notes=notes) for pod in observed.pods))
    made = reconcile(scaled, observed, NOW)
    assert [new.manifest["metadata"]["annotations"][NOTE_FILE] for new in made.workers] == [
        file_id(started)
    ] * 2


OF_THE_MEMBERSHIP = (
    *("minReplicas", "elasticity.settleSeconds", "elasticity.stabilizationSeconds"),
    *("elasticity.allowedSizes", "checkpoint.required", "failurePolicy.maxSkippedBatches"),
    *("straggler.detect.windowRounds", "straggler.detect.slowdownFactor"),
    *("straggler.respond", "straggler.cooldownSeconds"),
)
OF_ROUNDS = [p for p in FIELDS if p.startswith("collective.") and ACTS[p] is Acts.AT_ONCE]


@pytest.mark.parametrize("path", [*OF_THE_MEMBERSHIP, *OF_ROUNDS])
def test_the_coordinator_of_a_running_job_is_sent_what_acts_at_once(path: str) -> None:
    first, second = before_and_after(path)
    assert ACTS[path] is Acts.AT_ONCE
    assert first.settings is not None
    observed = training(2)
    assert observed.coordinator is not None
    has = msgspec.structs.replace(
        observed.coordinator,
        membership_settings=MembershipSettings.of(first.settings).id,
        settings=msgspec.to_builtins(RoundSettings.of(first.settings.collective)),
    )
    assert reconcile(first, replace(observed, coordinator=has), NOW).targets is None
    sent = reconcile(second, replace(observed, coordinator=has), NOW).targets
    assert sent is not None
    assert set(sent) == ({"settings"} if path in OF_ROUNDS else {"membership", "membership_id"})


def test_a_coordinator_that_cannot_take_settings_is_sent_none() -> None:
    """One of an earlier release reports no id; sending would never end."""
    _, second = before_and_after("minReplicas")
    assert reconcile(second, training(2), NOW).targets is None


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def notes_of(world: World, note: str) -> set[str]:
    return {pod["metadata"]["annotations"][note] for pod in world.pods()}


def mounted(world: World) -> set[str]:
    return {
        volume["secret"]["secretName"]
        for pod in world.pods()
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "paceline-job"
    }


def change(world: World, **spec: Any) -> None:
    world.server.change(PLURAL, NAMESPACE, "digits", spec=spec)


def test_a_command_changed_while_suspended_reaches_the_ranks(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(checkpoint={"path": "/c"}))
    world.settle(5)
    before = mounted(world)
    change(world, suspend=True)
    world.settle(30)
    assert world.pods() == []
    change(world, template=template(command=["python3", "other.py"]))
    world.settle(5)
    change(world, suspend=False)
    world.settle(30)
    assert len(world.pods()) == 2
    assert len(mounted(world)) == 1
    assert mounted(world).isdisjoint(before)
    body = world.server.find(PLURAL, NAMESPACE, "digits")
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"]


def test_a_job_changed_between_two_looks_gets_new_pods(world: World) -> None:
    """The operator may see neither the suspension nor the change, only what came of both."""
    world.server.insert(PLURAL, NAMESPACE, job_body(checkpoint={"path": "/c"}))
    world.settle(5)
    before = notes_of(world, NOTE_REVISION)
    change(world, suspend=True)
    change(world, template=template(args=["--other"]))
    change(world, suspend=False)
    world.settle(60)
    assert len(world.pods()) == 2
    after = notes_of(world, NOTE_REVISION)
    assert len(after) == 1
    assert after.isdisjoint(before), "no old arguments on a new image"
    assert {pod["metadata"]["labels"]["paceline.dev/attempt"] for pod in world.pods()} != {"1"}


def test_a_job_that_has_ended_shows_what_is_in_force(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body())
    world.settle(5)
    world.finish()
    world.settle(10)
    change(world, ttlSecondsAfterFinished=900)
    world.settle(5)
    body = world.server.find(PLURAL, NAMESPACE, "digits")
    assert body["status"]["state"] == "Complete"
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"]
    assert body["status"]["resolved"]["ttlSecondsAfterFinished"] == 900


def test_an_unchanged_job_is_never_stopped_for_its_revision() -> None:
    """A pod of an earlier release has no annotation; it is no reason to stop."""
    job = job_of(dict(RUNNING))
    for notes in ({}, {NOTE_REVISION: job.revision}):
        observed = training(2)
        observed = replace(observed, pods=tuple(replace(pod, notes=notes) for pod in observed.pods))
        assert reconcile(job, observed, NOW).delete == ()
    assert reconcile(job, Observed(), NOW).delete == ()
