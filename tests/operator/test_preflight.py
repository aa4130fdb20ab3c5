"""What the API server is asked before the first pod, and what a job says of the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from paceline_api.crdgen import PLURAL
from paceline_api.names import LABEL_ROLE
from paceline_api.pods.security import Level
from paceline_operator.cluster.api import CLAIMS, ApiError
from paceline_operator.core.pods.preflight import LOOKED_UP_MAX, looked_up
from paceline_operator.core.report.refused import ALSO

from testing.fake_cluster.observations import job_of
from testing.fake_cluster.world import NAMESPACE, World, job_body

LIMIT = ApiError(403, "Forbidden", 'pods "x" is forbidden: maximum cpu usage per Container is 1')
QUOTA = ApiError(403, "Forbidden", "x is forbidden: exceeded quota: few, requested: count/x=1")
NO_RIGHT = ApiError(403, "Forbidden", 'x is forbidden: User "o" cannot get resource "x" in API')


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def template(**pod: Any) -> dict[str, Any]:
    trainer = {"name": "trainer", "image": "t", "command": ["x"], **pod.pop("trainer", {})}
    return {"spec": {"containers": [trainer], **pod}}


GREEDY = {"trainer": {"resources": {"requests": {"cpu": "64"}}}}
"""A worker that asks for more than the coordinator's pod does."""
VOLUMES: list[dict[str, Any]] = [
    {"name": "a", "secret": {"secretName": "absent"}},
    {"name": "b", "persistentVolumeClaim": {"claimName": "data"}},
    {"name": "c", "secret": {"secretName": "maybe", "optional": True}},
]


def submit(world: World, **spec: Any) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body(**spec))


def degraded(world: World) -> tuple[str, str]:
    status = world.server.find(PLURAL, NAMESPACE, "digits").get("status", {})
    held = [
        condition
        for condition in status.get("conditions", ())
        if condition["type"] == "Degraded" and condition["status"] == "True"
    ]
    return (held[0]["reason"], held[0]["message"]) if held else ("", "")


def of_workers(pod: Mapping[str, Any]) -> ApiError | None:
    return LIMIT if pod["metadata"]["labels"][LABEL_ROLE] == "worker" else None


def ever_made(world: World) -> list[str]:
    return [text for text in world.server.writes if text.startswith("POST pods")]


def test_a_refused_worker_is_found_before_any_pod_is_made(world: World) -> None:
    world.server.admission = of_workers
    submit(world, template=template(**GREEDY))
    world.settle(60)
    reason, message = degraded(world)
    assert reason == "TemplateInvalid"
    assert LIMIT.message in message
    assert "correct the resources of the containers in spec.template" in message
    assert ever_made(world) == []
    assert world.server.of_kind("secrets") == []
    world.server.admission = lambda _: None
    world.settle(400)
    assert len(world.server.of_kind("pods")) == 3
    assert degraded(world) == ("", "")


def test_one_condition_has_all_that_the_cluster_says_to_a_job(world: World) -> None:
    world.server.admission = lambda _: LIMIT
    world.server.refusing = {"secrets": QUOTA, "services": QUOTA}
    submit(world, template=template(**GREEDY, volumes=VOLUMES))
    world.settle(5)
    _, message = degraded(world)
    assert "the API server refuses the pod: " in message
    assert "the API server refuses the job's Secret: x is forbidden: exceeded quota" in message
    assert "delete a Secret that nothing uses" in message
    assert "the coordinator's pod" not in message, "it is the same refusal as that of the worker"
    assert "spec.template.spec.volumes[1].persistentVolumeClaim.claimName: there is no" in message
    assert message.count(ALSO) == 2
    assert ever_made(world) == []


def test_a_namespace_that_refuses_a_pod_by_its_level_is_asked_for_the_rest(world: World) -> None:
    world.level = Level.BASELINE
    world.server.refusing = {"secrets": QUOTA}
    submit(world, template=template(hostNetwork=True))
    world.settle(5)
    reason, message = degraded(world)
    assert reason == "PodSecurity"
    assert "spec.template.spec.hostNetwork must not be true" in message
    assert "the job's Secret" in message
    assert ever_made(world) == []


@pytest.mark.parametrize(
    ("asked", "count"), [({}, 0), (GREEDY, 1), ({"nodeSelector": {"a": "b"}}, 0)]
)
def test_a_job_costs_one_dry_run_if_its_workers_ask_for_more_than_the_coordinator(
    world: World, asked: dict[str, Any], count: int
) -> None:
    submit(world, replicas=4, template=template(**asked))
    world.settle(30)
    assert world.server.requests["DRYRUN pods"] == count
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"replicas": 6})
    world.settle(30)
    assert len(world.server.of_kind("pods")) == 7
    assert world.server.requests["DRYRUN pods"] == count, "further pods need none"
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": True})
    world.settle(120)
    assert world.server.of_kind("pods") == []
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": False})
    world.settle(60)
    assert len(world.server.of_kind("pods")) == 7
    assert world.server.requests["DRYRUN pods"] == 2 * count, "one for each attempt"


def test_a_job_trains_where_a_webhook_allows_no_dry_run(world: World) -> None:
    world.server.no_dry_runs = True
    submit(world, template=template(**GREEDY))
    world.settle(30)
    assert len(world.server.of_kind("pods")) == 3
    assert degraded(world) == ("", "")


def test_missing_objects_are_reported_with_their_fields_and_delay_no_pod(world: World) -> None:
    present = {"metadata": {"name": "present", "namespace": NAMESPACE}}
    world.server.insert("secrets", NAMESPACE, present)
    world.kubelets = lambda: None  # type: ignore[method-assign]
    submit(world, template=template(volumes=VOLUMES, imagePullSecrets=[{"name": "present"}]))
    world.settle(2)
    reason, message = degraded(world)
    assert reason == "ObjectMissing"
    assert "spec.template.spec.volumes[0].secret.secretName: there is no Secret absent" in message
    assert "there is no PersistentVolumeClaim data" in message
    assert "maybe" not in message
    assert "present" not in message
    assert len(world.server.of_kind("pods")) == 3
    assert [each["reason"] for each in world.server.of_kind("events")] == ["ObjectMissing"]
    assert {each["metadata"]["name"] for each in world.server.of_kind("secrets")} >= {"present"}
    assert not any(e["metadata"]["name"] == "absent" for e in world.server.of_kind("secrets"))
    world.settle(61)
    assert degraded(world) == ("", ""), "from now on the kubelets say what the pods wait for"


def test_a_missing_object_is_no_longer_reported_once_a_worker_runs(world: World) -> None:
    submit(world, template=template(volumes=VOLUMES))
    world.settle(20)
    assert any(e["reason"] == "ObjectMissing" for e in world.server.of_kind("events"))
    assert degraded(world) == ("", "")


def test_an_operator_without_the_right_to_look_makes_the_pods(world: World) -> None:
    world.server.refusing[CLAIMS] = NO_RIGHT
    submit(world, template=template(volumes=VOLUMES[1:2]))
    world.settle(20)
    assert len(world.server.of_kind("pods")) == 3
    assert not any(e["reason"] == "ObjectMissing" for e in world.server.of_kind("events"))


def test_only_names_of_objects_get_into_a_path_and_their_number_is_bounded() -> None:
    """A name with a slash would be a request for something else with the operator's rights."""
    names = ["../../secrets/x", "A", "", "a/b", *(f"claim-{n}" for n in range(LOOKED_UP_MAX + 5))]
    volumes = [
        {"name": f"v{n}", "persistentVolumeClaim": {"claimName": name}}
        for n, name in enumerate(names)
    ]
    objects = looked_up(job_of(template=template(volumes=volumes)))
    assert [each.name for each in objects] == [f"claim-{n}" for n in range(LOOKED_UP_MAX)]
    assert looked_up(job_of(template=template(volumes="none", imagePullSecrets=[1]))) == ()
