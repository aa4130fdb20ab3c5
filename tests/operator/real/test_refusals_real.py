"""What a real API server refuses, by quota, LimitRange, policy and webhook, in its own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest

from testing.cluster.api import ApiError
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import Running, holds, job, living, own_requests, submit, until

pytestmark = pytest.mark.processes

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
POLICIES = f"{ADMISSION}/validatingadmissionpolicies"
BINDINGS = f"{ADMISSION}/validatingadmissionpolicybindings"
WEBHOOKS = f"{ADMISSION}/validatingwebhookconfigurations"
ROOM = {"cpu": "1", "memory": "1Gi"}
LABELED = {"metadata": {"labels": {"team": "vision"}}}


def quota(plane: ControlPlane, namespace: str, **hard: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    hard = {name.replace("__", "."): amount for name, amount in hard.items()}
    plane.api.create(path, {"metadata": {"name": "few"}, "spec": {"hard": hard}})
    until(lambda: plane.api.get(f"{path}/few").get("status", {}).get("hard"), "the quota counts")


def no_secrets(plane: ControlPlane, namespace: str) -> None:
    quota(plane, namespace, secrets="0")


def no_services(plane: ControlPlane, namespace: str) -> None:
    quota(plane, namespace, services="0")


def one_pod(plane: ControlPlane, namespace: str) -> None:
    quota(plane, namespace, pods="1")


def small_containers(plane: ControlPlane, namespace: str) -> None:
    limit = {"type": "Container", "max": {"cpu": "500m"}, "default": {"cpu": "400m"}}
    limit["defaultRequest"] = {"cpu": "100m"}
    path = f"/api/v1/namespaces/{namespace}/limitranges"
    plane.api.create(path, {"metadata": {"name": "small"}, "spec": {"limits": [limit]}})


def selects(namespace: str) -> dict[str, Any]:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def no_answer(plane: ControlPlane, namespace: str) -> None:
    webhook = {
        "name": "away.paceline.test",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": 1,
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "namespaceSelector": selects(namespace),
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
                "operations": ["CREATE"],
            }
        ],
    }
    plane.api.create(WEBHOOKS, {"metadata": {"name": f"away-{namespace}"}, "webhooks": [webhook]})


Refusing = Callable[[ControlPlane, str], None]
CASES: list[tuple[Refusing, str, tuple[str, ...], list[str]]] = [
    (
        no_secrets,
        "QuotaExceeded",
        ("the job's Secret", "exceeded quota: few", "delete a Secret"),
        [],
    ),
    (
        no_services,
        "QuotaExceeded",
        ("the Service paceline-jobs", "exceeded quota: few", "delete a Service"),
        [],
    ),
    (one_pod, "QuotaExceeded", ("exceeded quota: few", "lower spec.replicas"), ["coordinator"]),
    (
        small_containers,
        "TemplateInvalid",
        ("the coordinator's pod", "maximum cpu usage per Container", "spec.coordinator.resources"),
        [],
    ),
    (no_answer, "CreationRefused", ("failed calling webhook", "it is tried again"), []),
]


def degraded(plane: ControlPlane, namespace: str, reason: str) -> dict[str, Any] | None:
    condition = holds(job(plane, namespace), "Degraded")
    return condition if condition is not None and condition["reason"] == reason else None


@pytest.fixture
def spaces(plane: ControlPlane) -> Iterator[list[str]]:
    """Yield a namespace for each case."""
    with ExitStack() as stack:
        names = [stack.enter_context(plane.namespace(f"refused-{n}")) for n in range(len(CASES))]
        yield names
        for namespace in names:
            with suppress(ApiError):
                plane.api.delete(f"{WEBHOOKS}/away-{namespace}")


def test_each_kind_of_refusal_is_reported_with_the_words_of_the_api_server(
    plane: ControlPlane, namespace: str, spaces: list[str], running: Running
) -> None:
    del namespace
    for (refuse, *_), space in zip(CASES, spaces, strict=True):
        refuse(plane, space)
        submit(plane, space)
    for (_, reason, words, pods), space in zip(CASES, spaces, strict=True):
        condition = until(partial(degraded, plane, space, reason), f"{reason} in {space}")
        for word in words:
            assert word in condition["message"], condition
        made = [*living(plane, space), *living(plane, space, "coordinator")]
        assert len(made) == len(pods), made
    assert running.process is not None
    assert running.process.poll() is None


def test_one_condition_names_all_that_a_namespace_refuses_and_lacks(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    """No pod is made before, the coordinator's included."""
    del namespace, running
    with plane.namespace("refused-all") as space:
        quota(plane, space, secrets="0", services="0")
        small_containers(plane, space)
        trainer = {
            "name": "trainer",
            "image": "t",
            "command": ["x"],
            "resources": {"limits": {"cpu": "600m"}},
        }
        claim = {"name": "data", "persistentVolumeClaim": {"claimName": "absent"}}
        submit(plane, space, template={"spec": {"containers": [trainer], "volumes": [claim]}})
        condition = until(partial(degraded, plane, space, "TemplateInvalid"), "TemplateInvalid")
        for words in (
            "the API server refuses the pod: ",
            "maximum cpu usage per Container is 500m, but limit is 600m",
            "correct the resources of the containers in spec.template",
            "the API server refuses the coordinator's pod: ",
            "but limit is 1",
            "correct spec.coordinator.resources",
            "the API server refuses the job's Secret: ",
            "exceeded quota: few, requested: secrets=1",
            "the API server refuses the Service paceline-jobs",
            "spec.template.spec.volumes[0].persistentVolumeClaim.claimName: there is no Persistent",
        ):
            assert words in condition["message"], condition
        made = own_requests(plane, space, dry_runs=False)
        assert made["create", "pods"] == 0


@pytest.mark.exhaustive
def test_a_missing_secret_is_reported_by_an_operator_that_may_not_read_it(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    del running
    path = f"/api/v1/namespaces/{namespace}/secrets"
    plane.api.create(path, {"metadata": {"name": "there"}, "stringData": {"a": "b"}})
    volumes = [
        {"name": "a", "secret": {"secretName": "absent"}},
        {"name": "b", "secret": {"secretName": "there"}},
    ]
    trainer = {"name": "trainer", "image": "t", "command": ["x"]}
    submit(plane, namespace, template={"spec": {"containers": [trainer], "volumes": volumes}})
    condition = until(partial(degraded, plane, namespace, "ObjectMissing"), "ObjectMissing")
    assert "volumes[0].secret.secretName: there is no Secret absent" in condition["message"]
    assert "Secret there" not in condition["message"]
    until(lambda: len(living(plane, namespace)) == 2, "2 workers, which wait for it")
    names = {secret["metadata"]["name"] for secret in plane.api.items(path)}
    assert "absent" not in names


@pytest.mark.exhaustive
def test_a_namespace_that_demands_limits_and_labels_gets_all_pods(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    """A quota on limits of CPU and memory, and a policy that every pod has the label `team`."""
    del running
    quota(plane, namespace, limits__cpu="8", limits__memory="8Gi", requests__cpu="8")
    policy = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": selects(namespace),
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "resources": ["pods"],
                    "operations": ["CREATE"],
                }
            ],
        },
        "validations": [
            {"expression": "has(object.metadata.labels) && 'team' in object.metadata.labels"}
        ],
    }
    name = f"team-{namespace}"
    plane.api.create(POLICIES, {"metadata": {"name": name}, "spec": policy})
    binding = {"policyName": name, "validationActions": ["Deny"]}
    plane.api.create(BINDINGS, {"metadata": {"name": name}, "spec": binding})
    bare = {"name": "x", "image": "x", "resources": {"limits": ROOM}}
    pod = {"metadata": {"name": "x"}, "spec": {"containers": [bare]}}
    try:
        until(lambda: _refused(plane, namespace, pod), "the policy is in force")
        trainer = {"name": "trainer", "image": "t", "command": ["x"], "resources": {"limits": ROOM}}
        submit(plane, namespace, template=LABELED | {"spec": {"containers": [trainer]}})
        until(lambda: len(living(plane, namespace)) == 2, "2 workers")
        assert len(living(plane, namespace, "coordinator")) == 1
    finally:
        plane.api.delete(f"{BINDINGS}/{name}")
        plane.api.delete(f"{POLICIES}/{name}")


def _refused(plane: ControlPlane, namespace: str, pod: dict[str, Any]) -> bool:
    try:
        plane.api.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    except ApiError:
        return True
    return False
