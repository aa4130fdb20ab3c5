"""Refused creations of each kind of object: the condition, its remedy, and what is made before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from paceline_api.crdgen import PLURAL
from paceline_api.names import LABEL_ROLE
from paceline_operator.cluster.api import ApiError
from paceline_operator.core.refusals import (
    TOLD_COUNT,
    CreationRefusal,
    RefusalKind,
    Subject,
    refused_creation,
    remedy,
)
from paceline_operator.core.report.refused import as_condition, as_events

from testing.fake_cluster.observations import NOW, job_of
from testing.fake_cluster.world import NAMESPACE, World, job_body

NO_RIGHT = ApiError(403, "Forbidden", 'x is forbidden: User "o" cannot create resource "x" in API')
QUOTA = ApiError(403, "Forbidden", "x is forbidden: exceeded quota: few, requested: count/x=1")
WEBHOOK = ApiError(403, "Forbidden", 'admission webhook "w.example" denied the request: not today')
POLICY = ApiError(422, "Invalid", "ValidatingAdmissionPolicy 'p' denied request: not today")
DOWN = ApiError(500, "InternalError", 'failed calling webhook "w.example": connection refused')


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def submit(world: World, **spec: Any) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(**spec))


def degraded(world: World) -> tuple[str, str]:
    status = world.server.find(PLURAL, NAMESPACE, "digits").get("status", {})
    conditions = [c for c in status.get("conditions", ()) if c["type"] == "Degraded"]
    held = [c for c in conditions if c["status"] == "True"]
    return (held[0]["reason"], held[0]["message"]) if held else ("", "")


def roles(world: World) -> list[str]:
    return sorted(pod["metadata"]["labels"][LABEL_ROLE] for pod in world.server.of_kind("pods"))


OBJECTS = {
    "secrets": ("the job's Secret", "delete a Secret"),
    "services": ("the Service paceline-jobs", "delete a Service"),
    "namespaces": ("the namespace's level of pod security", ""),
}
ERRORS = {
    "quota": (QUOTA, "QuotaExceeded", "raise the quota"),
    "right": (NO_RIGHT, "CreationRefused", "upgrade the chart paceline"),
    "webhook": (WEBHOOK, "TemplateInvalid", "have an administrator permit it"),
    "policy": (POLICY, "TemplateInvalid", "have an administrator permit it"),
    "away": (DOWN, "CreationRefused", "it is tried again"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", OBJECTS)
def test_each_object_that_cannot_be_made_is_reported_and_retried(
    world: World, kind: str, error: str
) -> None:
    refused, reason, advice = ERRORS[error]
    named, less = OBJECTS[kind]
    world.server.refusing[kind] = refused
    submit(world)
    world.settle(30)
    assert world.server.of_kind("pods") == []
    reported, message = degraded(world)
    assert reported == (reason if error not in ("webhook", "policy") else "CreationRefused")
    assert named in message
    assert refused.message in message
    assert advice in message
    assert "spec.replicas" not in message, "fewer workers need no fewer of it"
    if error == "quota":
        assert less in message
    events = [e for e in world.server.of_kind("events") if e["reason"] == reported]
    assert len(events) == 1
    assert refused.message in events[0]["message"]
    world.server.refusing.clear()
    world.settle(400)
    assert len(world.server.of_kind("pods")) == 3
    assert degraded(world) == ("", "")


def test_a_failure_that_passes_is_not_reported(world: World) -> None:
    """A webhook or an overloaded API server that is away for a moment is nobody's concern."""
    world.server.refusing["secrets"] = DOWN
    submit(world)
    world.settle(1)
    assert degraded(world) == ("", "")
    refusal = CreationRefusal(RefusalKind.TRANSIENT, "away", NOW, TOLD_COUNT - 1)
    assert as_condition(job_of(), refusal) is None
    assert as_events(job_of(), refusal) == []


# ---- pods ---------------------------------------------------------------------------------------


def refuse(role: str, error: ApiError) -> Callable[[Mapping[str, Any]], ApiError | None]:
    return lambda pod: error if pod["metadata"]["labels"][LABEL_ROLE] == role else None


def test_the_coordinator_comes_first(world: World) -> None:
    """Room for one pod is not given to a worker that nobody would coordinate."""
    world.server.quota = 1
    submit(world)
    world.settle(20)
    assert roles(world) == ["coordinator"]
    reason, message = degraded(world)
    assert reason == "QuotaExceeded"
    assert "lower spec.replicas or the resources of spec.template" in message


def test_a_refused_coordinator_is_reported_and_no_worker_holds_a_device(world: World) -> None:
    words = "pods is forbidden: maximum cpu usage per Container is 500m, but limit is 1"
    world.server.admission = refuse("coordinator", ApiError(403, "Forbidden", words))
    submit(world)
    world.settle(20)
    assert roles(world) == []
    reason, message = degraded(world)
    assert reason == "TemplateInvalid"
    assert message.startswith(f"the API server refuses the coordinator's pod: {words}; ")
    assert "correct spec.coordinator.resources" in message


@pytest.mark.parametrize("error", [WEBHOOK, POLICY])
def test_a_refused_template_leaves_no_coordinator_behind(world: World, error: ApiError) -> None:
    world.server.admission = refuse("worker", error)
    submit(world)
    world.settle(700)
    assert roles(world) == []
    made = [w for w in world.server.writes if w.startswith("POST pods digits-coordinator")]
    assert len(made) == 1, "later tries begin with a worker"
    assert "the API server refuses the pod: " in degraded(world)[1]
    world.server.admission = lambda _: None
    world.settle(400)
    assert roles(world) == ["coordinator", "worker", "worker"]


@pytest.mark.parametrize(
    ("words", "subject", "field"),
    [
        ("must specify limits.cpu for: trainer", Subject.WORKER, "resources of the containers"),
        ("must specify limits.cpu for: x", Subject.COORDINATOR, "spec.coordinator.resources"),
        (
            'error looking up service account a/b: serviceaccount "b" not found',
            Subject.WORKER,
            "spec.template.spec.serviceAccountName",
        ),
        (
            "no PriorityClass with name high was found",
            Subject.COORDINATOR,
            "spec.coordinator.priorityClassName",
        ),
        ("you must provide labels: {team}", Subject.COORDINATOR, "spec.template.metadata"),
        ("not today", Subject.WORKER, "correct spec.template"),
        ("not today", Subject.COORDINATOR, "correct spec.coordinator, or what it has"),
    ],
)
def test_the_remedy_names_the_field_that_the_refusal_is_about(
    words: str, subject: Subject, field: str
) -> None:
    assert field in remedy(CreationRefusal(RefusalKind.FORBIDDEN, words, NOW, subject=subject))


def test_a_missing_right_of_the_operator_is_no_mistake_in_the_template() -> None:
    words = 'pods is forbidden: User "o" cannot create resource "pods" in API group ""'
    kind = refused_creation(403, words, transient=False)
    assert kind is RefusalKind.NO_RIGHT
    condition = as_condition(job_of(), CreationRefusal(kind, words, NOW))
    assert condition is not None
    assert condition[0] == "CreationRefused"
    assert "spec.template" not in condition[1]
