"""Runtimes on a real API server: validated, merged at admission, and kept for a job's life."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from paceline.jobs import places
from paceline.jobs.errors import NoSuchRuntimeError
from paceline_api.runtimes.reading import problems_of, runtime_from_mapping
from paceline_api.types.enums import RuntimeKind

from testing.cluster.api import ApiError
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import (
    JOBS,
    Running,
    change,
    holds,
    job,
    living,
    pods,
    submit,
    until,
)
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes

API = "/apis/paceline.dev/v1alpha1"
CLUSTER = f"{API}/clustertrainingruntimes"
STRICT = "?dryRun=All&fieldValidation=Strict"
ENV = {"name": "NCCL_DEBUG", "value": "INFO"}


def trainer(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


def runtime(name: str, kind: str = "ClusterTrainingRuntime", **spec: Any) -> dict[str, Any]:
    spec.setdefault("template", trainer(image="base:1", env=[ENV]))
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


@pytest.fixture
def torch(plane: ControlPlane, namespace: str) -> Iterator[str]:
    """Create a runtime of the cluster, named as the namespace, and return its name."""
    plane.api.create(CLUSTER, runtime(namespace))
    yield namespace
    if any(one["metadata"]["name"] == namespace for one in plane.api.items(CLUSTER)):
        plane.api.delete(f"{CLUSTER}/{namespace}")


def ask(plane: ControlPlane, namespace: str, of: str, name: str = "digits", **spec: Any) -> None:
    """Submit a job with a runtime that brings a command and nothing else."""
    spec.setdefault("template", trainer(command=["python3", "train.py"]))
    ref = spec.pop("runtimeRef", {"name": of})
    submit(plane, namespace, name, runtimeRef=ref, **spec)


def worker(plane: ControlPlane, namespace: str, name: str) -> dict[str, Any]:
    """Wait for a worker's pod and return its container `trainer`."""

    def current() -> dict[str, Any] | None:
        named = [p for p in pods(plane, namespace) if p["metadata"]["name"] == name]
        return named[0]["spec"]["containers"][0] if named else None

    container: dict[str, Any] = until(current, f"pod {name}")
    return container


def degraded(plane: ControlPlane, namespace: str, reason: str, name: str = "digits") -> str:
    """Wait until a job is Degraded for this reason, and return the message."""

    def message() -> str | None:
        condition = holds(job(plane, namespace, name), "Degraded")
        return condition["message"] if condition and condition["reason"] == reason else None

    return str(until(message, f"Degraded for {reason}"))


@pytest.mark.parametrize(
    ("spec", "field", "way_out"),
    [
        ({"replicas": 2}, "spec.replicas", "unknown field"),
        ({"mayOverride": ["mode"]}, "spec.mayOverride", "write paths below spec"),
        ({"mayOverride": ["spec.collective"]}, "spec.mayOverride", "such as collective.mode"),
        ({"collective": {"mode": "Fast"}}, "spec.collective.mode", "Unsupported value"),
        (
            {"template": trainer(env=[{"name": "RANK", "value": "1"}])},
            "spec.template.spec.containers",
            "remove it from env",
        ),
        (
            {"template": trainer(command=["torchrun", "t.py"])},
            "spec.template.spec.containers",
            "name the script itself",
        ),
        (
            {"template": {"spec": {"containers": []}}},
            "spec.template.spec.containers",
            "should have at least 1 items",
        ),
        (
            {"template": {"spec": {"containers": [{"name": "t"}], "restartPolicy": "Always"}}},
            "spec.template.spec.restartPolicy",
            "remove it",
        ),
        (
            {"template": {"metadata": {"labels": {"paceline.dev/slot": "1"}}, **trainer()}},
            "spec.template.metadata.labels",
            "use a prefix of your own",
        ),
    ],
)
def test_the_api_server_refuses_a_wrong_runtime_with_field_and_remedy(
    plane: ControlPlane, spec: dict[str, Any], field: str, way_out: str
) -> None:
    with pytest.raises(ApiError) as caught:
        plane.api.create(CLUSTER + STRICT, runtime("r", **spec))
    assert field in caught.value.reason
    assert way_out in caught.value.reason


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"template": {"spec": {"containers": [{"name": "only-a-sidecar", "image": "i"}]}}},
        {"template": trainer(), "mayOverride": []},
        {"mayOverride": ["template.spec.containers[trainer].env[A]", "fabric", "collective.mode"]},
    ],
)
def test_a_runtime_may_say_little(plane: ControlPlane, spec: dict[str, Any]) -> None:
    plane.api.create(CLUSTER + STRICT, {**runtime("r"), "spec": spec})


def test_a_job_with_a_runtime_need_not_be_whole_and_cannot_change_its_runtime(
    plane: ControlPlane, namespace: str
) -> None:
    ask(plane, namespace, "r", replicas=2, collective={"quorum": 12})
    ask(plane, namespace, "r", "bare", template=None)
    for name, changed in (("digits", {"name": "other"}), ("bare", None)):
        with pytest.raises(ApiError, match=r"runtimeRef\.name cannot be changed"):
            change(plane, namespace, name, runtimeRef=changed)
    with pytest.raises(ApiError, match="starts ranks itself"):
        ask(plane, namespace, "r", "launches", template=trainer(command=["torchrun", "t.py"]))


def test_a_job_keeps_the_runtime_of_its_admission_for_all_its_attempts(
    plane: ControlPlane, namespace: str, running: Running, torch: str
) -> None:
    with plane.fake_nodes(2), Fleet(plane, namespace):
        ask(plane, namespace, torch, replicas=2, checkpoint={"path": "/c"})
        first = worker(plane, namespace, "digits-0-1")
        assert first["image"] == "base:1"
        assert ENV in first["env"]
        until(lambda: holds(job(plane, namespace), "RingReady"), "it trains")
        kept = job(plane, namespace)["status"]["runtime"]
        assert (kept["kind"], kept["name"]) == ("ClusterTrainingRuntime", torch)
        assert kept["generation"] == 1

        new = {"template": trainer(image="base:2")}
        plane.api.patch(f"{CLUSTER}/{torch}", {"spec": new})
        plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/digits-0-1")
        assert worker(plane, namespace, "digits-0-2")["image"] == "base:1", "a replacement"
        ask(plane, namespace, torch, "later", replicas=1)
        assert worker(plane, namespace, "later-0-1")["image"] == "base:2", "a new job"

        change(plane, namespace, suspend=True)
        until(lambda: job(plane, namespace)["status"]["state"] == "Suspended", "suspended")
        until(lambda: living(plane, namespace) == ["later-0-1"], "its pods are gone")
        plane.api.delete(f"{CLUSTER}/{torch}")
        running.end()
        running.started(times=2)
        change(plane, namespace, suspend=False)

        def again() -> str | None:
            return next((n for n in living(plane, namespace) if n.startswith("digits-")), None)

        resumed = worker(plane, namespace, str(until(again, "it is resumed", 90)))
        assert resumed["image"] == "base:1"
        assert ENV in resumed["env"]


def test_a_job_waits_for_a_runtime_that_is_missing_and_gets_no_pod_before(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    with plane.fake_nodes(1), Fleet(plane, namespace):
        mine = f"{API}/namespaces/{namespace}/trainingruntimes"
        other = f"{API}/namespaces/default/trainingruntimes"
        plane.api.create(other, runtime(namespace, "TrainingRuntime"))
        try:
            ref = {"name": namespace, "kind": "TrainingRuntime"}
            ask(plane, namespace, "", replicas=1, runtimeRef=ref)
            message = degraded(plane, namespace, "RuntimeNotFound")
            assert f"there is no TrainingRuntime {namespace} in namespace {namespace}" in message
            assert "make it" in message
            assert holds(job(plane, namespace), "Stalled")
            assert pods(plane, namespace) == pods(plane, namespace, "coordinator") == []
        finally:
            plane.api.delete(f"{other}/{namespace}")
        plane.api.create(mine, runtime(namespace, "TrainingRuntime"))
        assert worker(plane, namespace, "digits-0-1")["image"] == "base:1"


@pytest.mark.exhaustive
def test_an_override_that_the_runtime_does_not_allow_makes_no_pod_until_it_is_allowed(
    plane: ControlPlane, namespace: str, running: Running, torch: str
) -> None:
    with plane.fake_nodes(1), Fleet(plane, namespace):
        debug = {"name": "NCCL_DEBUG", "value": "TRACE"}
        own = trainer(command=["python3", "train.py"], image="mine:1", env=[debug])
        ask(plane, namespace, torch, replicas=1, template=own)
        message = degraded(plane, namespace, "OverrideRefused")
        assert "spec.template.spec.containers[trainer].env[NCCL_DEBUG]" in message
        assert f"ClusterTrainingRuntime {torch}" in message
        assert pods(plane, namespace) == []
        may = ["template.spec.containers[trainer]"]
        plane.api.patch(f"{CLUSTER}/{torch}", {"spec": {"mayOverride": may}})
        made = worker(plane, namespace, "digits-0-1")
        assert made["image"] == "mine:1"
        assert debug in made["env"]
        assert ENV not in made["env"]


def test_a_runtime_tells_in_its_status_whether_jobs_are_valid_with_it(
    plane: ControlPlane, namespace: str, running: Running, torch: str
) -> None:
    def ready(generation: int) -> dict[str, Any] | None:
        status = plane.api.get(f"{CLUSTER}/{torch}").get("status", {})
        if status.get("observedGeneration") != generation:
            return None
        condition: dict[str, Any] = status["conditions"][0]
        return condition

    good = until(lambda: ready(1), "a status")
    assert (good["status"], good["reason"]) == ("True", "RuntimeValid")
    wrong = {"procsPerReplica": 2, "parallelism": {"model": 3}}
    plane.api.patch(f"{CLUSTER}/{torch}", {"spec": wrong})
    bad = until(lambda: ready(2), "a new status")
    assert (bad["status"], bad["reason"]) == ("False", "RuntimeInvalid")
    assert "spec.parallelism.model: 3 does not divide procsPerReplica" in bad["message"]

    ask(plane, namespace, torch, replicas=1)
    message = degraded(plane, namespace, "SpecInvalid")
    assert message.startswith(f"merged with ClusterTrainingRuntime {torch}: spec.parallelism.model")
    assert pods(plane, namespace) == []


def test_a_job_without_template_and_runtime_is_refused(plane: ControlPlane, namespace: str) -> None:
    path = JOBS.format(namespace)
    body = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "digits"},
        "spec": {"replicas": 1},
    }
    with pytest.raises(ApiError, match="name a runtime that has one"):
        plane.api.create(path, body)


def test_paceline_lists_runtimes_and_prints_one_for_a_laptop(
    plane: ControlPlane, namespace: str, torch: str
) -> None:
    mine = f"{API}/namespaces/{namespace}/trainingruntimes"
    plane.api.create(mine, runtime("team", "TrainingRuntime", description="For this team."))
    jobs = places.cluster(plane.kubeconfig, namespace=namespace)
    rows = {(row.kind, row.name): row for row in jobs.runtimes()}
    assert ("ClusterTrainingRuntime", torch) in rows
    assert rows["TrainingRuntime", "team"].description == "For this team."
    parsed = runtime_from_mapping(jobs.runtime(RuntimeKind.NAMESPACED, "team"))
    assert problems_of(parsed) == []
    with pytest.raises(NoSuchRuntimeError, match="no ClusterTrainingRuntime team in the cluster"):
        jobs.runtime(RuntimeKind.CLUSTER, "team")
