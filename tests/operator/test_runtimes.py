"""How the operator admits a job with its runtime, and what it says about the runtime (C21)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from paceline_api.times import timestamp
from paceline_operator.cluster.store import Store
from paceline_operator.core.job import JobObject, read_again, read_job
from paceline_operator.core.observed import Observed
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.runtime import RuntimeKey, SeenRuntime, judge

from testing.fake_cluster.observations import NOW, UID
from testing.fake_cluster.parts import START_S, job_body


def trainer(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


def seen_runtime(generation: int = 1, **spec: Any) -> SeenRuntime:
    spec.setdefault("template", trainer(image="base:1"))
    return SeenRuntime(
        "ClusterTrainingRuntime", "torch", uid="runtime-uid", generation=generation, spec=spec
    )


def known(*runtimes: SeenRuntime) -> dict[RuntimeKey, SeenRuntime]:
    return {runtime.key: runtime for runtime in runtimes}


def body(status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    spec.setdefault("template", trainer(command=["python3", "t.py"]))
    made = job_body(runtimeRef={"name": "torch"}, **spec)
    made["metadata"] |= {"uid": UID, "generation": 3, "creationTimestamp": timestamp(START_S)}
    return {**made, "status": status or {}}


def admitted(job: JobObject) -> dict[str, Any]:
    """Return the status that the first decision about a job writes."""
    changes = reconcile(job, Observed(), NOW)
    assert changes.workers == ()
    assert changes.coordinator is None, "the runtime is in the status before a pod is made"
    assert changes.status is not None
    assert changes.look_again_s == NOW
    return dict(changes.status)


def test_the_runtime_is_stored_before_the_first_pod_and_then_only_that_copy_counts() -> None:
    status = admitted(read_job(body(), known(seen_runtime())))
    assert status["runtime"]["uid"] == "runtime-uid"
    for later in ((), (seen_runtime(2, template=trainer(image="base:2")),)):
        job = read_job(body(status), known(*later))
        changes = reconcile(job, Observed(), NOW + 1)
        images = {new.manifest["spec"]["containers"][0]["image"] for new in changes.workers}
        assert images == {"base:1"}
        assert changes.coordinator is not None
        assert changes.coordinator.manifest["spec"]["containers"][0]["image"] == "base:1"


def test_settings_of_the_runtime_are_in_force_and_in_the_status() -> None:
    runtime = seen_runtime(procsPerReplica=4, collective={"mode": "Full"}, backoffLimit=1)
    job = read_job(body(), known(runtime))
    assert job.settings is not None
    assert (job.settings.procs_per_replica, job.settings.backoff_limit) == (4, 1)
    resolved = admitted(job)["resolved"]
    assert resolved["collective"]["mode"] == "Full"
    assert "runtimeRef" not in resolved


@pytest.mark.parametrize(
    ("runtime", "job", "reason", "message"),
    [
        (None, {}, "RuntimeNotFound", "there is no ClusterTrainingRuntime torch in the cluster"),
        (
            seen_runtime(backoffLimit=1),
            {"backoffLimit": 2},
            "OverrideRefused",
            "spec.backoffLimit: 2 overrides 1 of ClusterTrainingRuntime torch",
        ),
        (
            seen_runtime(maxReplicas=1),
            {},
            "SpecInvalid",
            "merged with ClusterTrainingRuntime torch: spec.maxReplicas: 1 is less than",
        ),
    ],
)
def test_a_job_that_cannot_be_merged_makes_nothing_and_keeps_no_runtime(
    runtime: SeenRuntime | None, job: dict[str, Any], reason: str, message: str
) -> None:
    read = read_job(body(**job), known(*([runtime] if runtime else [])))
    changes = reconcile(read, Observed(), NOW)
    assert changes.writes == 2, "the status and an Event"
    assert changes.status is not None
    assert "runtime" not in changes.status
    conditions = {c["type"]: c for c in changes.status["conditions"]}
    assert conditions["Degraded"]["reason"] == conditions["Stalled"]["reason"] == reason
    assert message in conditions["Degraded"]["message"]
    (event,) = changes.events
    assert (event.reason, event.warning) == (reason, True)
    assert read.waits_for_runtime
    mended = read_job(body(), known(seen_runtime(2)))
    assert not mended.problems


def test_an_override_of_an_admitted_job_is_refused_by_the_stored_copy() -> None:
    kept = {"runtime": seen_runtime(backoffLimit=1).kept()}
    loose = seen_runtime(2, backoffLimit=1, mayOverride=["backoffLimit"])
    job = read_job(body(kept, backoffLimit=2), known(loose))
    assert job.reason == "OverrideRefused"
    assert not job.waits_for_runtime, "no change of the runtime helps this job"


def test_a_runtime_of_a_namespace_serves_that_namespace_only() -> None:
    local = replace(seen_runtime(), kind="TrainingRuntime", namespace="default")
    made = body()
    made["spec"]["runtimeRef"]["kind"] = "TrainingRuntime"
    assert not read_job(made, known(local)).problems
    made["metadata"]["namespace"] = "other"
    assert "TrainingRuntime torch in namespace other" in read_job(made, known(local)).problems


def test_a_stored_runtime_is_read_without_parsing_the_spec() -> None:
    runtimes = known(seen_runtime())
    first = read_job(body(), runtimes)
    stored = body(admitted(first))
    again = read_again(stored, body(), first, {})
    assert again == read_job(stored, {})
    assert again.spec is first.spec


def test_a_change_of_a_runtime_wakes_the_jobs_without_pods() -> None:
    woken: list[tuple[str, str]] = []
    store = Store(woken.append)
    made = body()
    made["metadata"]["resourceVersion"] = "1"
    store.put_job(made)
    woken.clear()
    store.put_runtime(seen_runtime(2))
    assert woken == [("default", "digits")]
    store.put_runtime(replace(seen_runtime(2), status={"observedGeneration": 2}))
    store.put_runtime(seen_runtime(1))
    assert len(woken) == 1, "a status and a late answer are no change"
    assert store.runtimes[seen_runtime().key].generation == 2


def test_a_runtime_is_judged_once_for_each_generation() -> None:
    good = judge(seen_runtime(), NOW)
    assert good is not None
    (ready,) = good["conditions"]
    assert (ready["status"], ready["reason"]) == ("True", "RuntimeValid")
    assert judge(replace(seen_runtime(), status=good), NOW + 5) is None
    wrong = replace(seen_runtime(2, mayOverride=["template.spec.containers[a].env"]), status=good)
    bad = judge(wrong, NOW + 5)
    assert bad is not None
    (ready,) = bad["conditions"]
    assert (ready["status"], ready["reason"]) == ("False", "RuntimeInvalid")
    assert "spec.mayOverride" in ready["message"]
    assert ready["lastTransitionTime"] == timestamp(NOW + 5)
    malformed = judge(seen_runtime(3, collective={"mode": "Fast"}), NOW)
    assert malformed is not None
    assert "spec.collective.mode" in malformed["conditions"][0]["message"]
