"""The operator itself holds pods to the Pod Security level of their namespace."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline_api.crdgen import PLURAL
from paceline_api.pods.security import LABEL, Level, level_of, violations
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.levels import FRESH_S, Levels
from paceline_operator.core.pods.children import coordinator, worker
from paceline_operator.core.pods.fabric import ChosenFabric

from testing.bad_pods import ALLOWED, BROKEN_BASELINE, BROKEN_RESTRICTED, pod
from testing.fake_cluster.observations import job_of
from testing.fake_cluster.server import Server
from testing.fake_cluster.world import NAMESPACE, World, job_body

BASELINE, RESTRICTED = Level.BASELINE, Level.RESTRICTED


@pytest.mark.parametrize("name", BROKEN_BASELINE)
def test_each_baseline_control_is_enforced_at_both_levels(name: str) -> None:
    body, words = BROKEN_BASELINE[name]
    assert violations(body, Level.PRIVILEGED) == []
    for level in (BASELINE, RESTRICTED):
        assert any(words in text for text in violations(body, level)), violations(body, level)


@pytest.mark.parametrize("name", BROKEN_RESTRICTED)
def test_each_restricted_control_is_enforced_only_at_its_level(name: str) -> None:
    body, words = BROKEN_RESTRICTED[name]
    assert violations(body, BASELINE) == []
    problems = violations(body, RESTRICTED)
    assert len(problems) == 1, problems
    assert words in problems[0]


@pytest.mark.parametrize("name", ALLOWED)
def test_a_pod_that_the_standards_allow_has_no_violations(name: str) -> None:
    assert violations(ALLOWED[name], RESTRICTED) == []


def test_pods_of_a_plain_job_satisfy_restricted() -> None:
    job = job_of()
    tcp = ChosenFabric("tcp", "TCP", {})
    assert violations(worker(job, 0, 1, key_id="k", fabric=tcp), RESTRICTED) == []
    assert violations(coordinator(job, 1, key_id="k"), RESTRICTED) == []


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below),
)


@pytest.mark.long
@given(st.dictionaries(st.sampled_from(["volumes", "securityContext", "initContainers"]), anything))
def test_a_template_of_any_shape_raises_no_exception(spec: dict[str, Any]) -> None:
    violations({"metadata": {}, "spec": {**pod()["spec"], **spec}}, RESTRICTED)


@pytest.mark.parametrize(
    ("labels", "level"),
    [
        ({}, Level.PRIVILEGED),
        ({LABEL: "privileged"}, Level.PRIVILEGED),
        ({LABEL: "baseline"}, BASELINE),
        ({LABEL: "restricted"}, RESTRICTED),
        ({LABEL: "Baseline"}, RESTRICTED),
        ({LABEL: ""}, RESTRICTED),
        ({"pod-security.kubernetes.io/warn": "restricted"}, Level.PRIVILEGED),
    ],
)
def test_the_level_comes_from_the_label_and_an_unknown_one_is_strictest(
    labels: dict[str, str], level: Level
) -> None:
    assert level_of(labels) is level


# ---- the job ------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def submit(world: World, **spec: Any) -> None:
    body = job_body(replicas=2)
    body["spec"]["template"]["spec"] |= spec
    world.server.insert(PLURAL, NAMESPACE, body)


def degraded(world: World) -> dict[str, Any]:
    status = world.server.find(PLURAL, NAMESPACE, "digits").get("status", {})
    return next((c for c in status.get("conditions", ()) if c["type"] == "Degraded"), {})


@pytest.mark.parametrize("level", [BASELINE, RESTRICTED])
def test_a_job_that_violates_the_level_gets_no_pod_and_names_the_field(
    world: World, level: Level
) -> None:
    world.level = level
    submit(world, hostNetwork=True)
    world.settle(20)
    assert world.server.of_kind("pods") == []
    assert degraded(world)["reason"] == "PodSecurity"
    assert "spec.template.spec.hostNetwork must not be true" in degraded(world)["message"]
    assert f'"{level}" of namespace {NAMESPACE}' in degraded(world)["message"]
    events = [e for e in world.server.of_kind("events") if e["reason"] == "PodSecurity"]
    assert len(events) == 1


def test_a_job_starts_once_its_template_is_corrected(world: World) -> None:
    world.level = BASELINE
    submit(world, hostNetwork=True)
    world.settle(20)
    body = copy.deepcopy(job_body(replicas=2)["spec"]["template"])
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"template": body})
    world.settle(20)
    assert len(world.server.of_kind("pods")) == 3
    assert degraded(world).get("status") != "True"


def test_a_namespace_without_a_level_allows_any_pod(world: World) -> None:
    submit(world, hostNetwork=True)
    world.settle(20)
    assert len(world.server.of_kind("pods")) == 3


# ---- the label ----------------------------------------------------------------------------------


def test_the_level_is_cached_and_a_refused_read_is_an_error() -> None:
    server, now_s = Server(lambda: 0.0), 0.0
    server.objects["namespaces", "", "a"] = {"metadata": {"name": "a", "labels": {}}}
    levels = Levels(server, lambda: now_s)
    assert asyncio.run(levels.of("a")) is Level.PRIVILEGED
    server.objects["namespaces", "", "a"]["metadata"]["labels"] = {LABEL: "baseline"}
    assert asyncio.run(levels.of("a")) is Level.PRIVILEGED
    assert server.requests["GET namespaces"] == 1
    now_s = FRESH_S
    assert asyncio.run(levels.of("a")) is BASELINE
    server.refusing["namespaces"] = ApiError(403, "Forbidden", "no")
    now_s *= 2
    with pytest.raises(ApiError):
        asyncio.run(levels.of("a"))
