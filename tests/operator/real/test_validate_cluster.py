"""`paceline validate --cluster`: what a real API server would say, before anything is created."""

from __future__ import annotations

from typing import Any

import pytest
from paceline.jobs import places
from paceline.jobs.interface import Checks
from paceline_api.reading.load import job_from_mapping

from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import JOBS
from testing.fake_cluster.parts import job_body

pytestmark = pytest.mark.processes

RUNTIMES = "/apis/paceline.dev/v1alpha1/namespaces/{}/trainingruntimes"


def checked(plane: ControlPlane, namespace: str, user: str = "", **spec: Any) -> Checks:
    kubeconfig = plane.kubeconfig_of(user) if user else plane.kubeconfig
    jobs = places.cluster(kubeconfig, namespace=namespace)
    return jobs.check(job_from_mapping(job_body(**spec)))


def template(**pod: Any) -> dict[str, Any]:
    trainer = {"name": "trainer", "image": "t", "command": ["x"], **pod.pop("trainer", {})}
    return {"spec": {"containers": [trainer], **pod}}


def test_each_object_that_is_missing_is_reported_with_its_field(
    plane: ControlPlane, namespace: str
) -> None:
    core = f"/api/v1/namespaces/{namespace}"
    there = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "there"}}
    plane.api.create(f"{core}/secrets", there)
    asked = template(
        serviceAccountName="nobody",
        priorityClassName="high",
        imagePullSecrets=[{"name": "registry"}],
        volumes=[
            {"name": "a", "secret": {"secretName": "there"}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "c", "configMap": {"name": "maybe", "optional": True}},
        ],
        trainer={
            "env": [
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "token", "key": "k"}}},
            ],
            "envFrom": [{"configMapRef": {"name": "settings"}}],
        },
    )
    checks = checked(plane, namespace, template=asked)
    pod = "spec.template.spec"
    assert {finding.field for finding in checks.wrong} == {
        f"{pod}.serviceAccountName",
        f"{pod}.priorityClassName",
        f"{pod}.imagePullSecrets[0].name",
        f"{pod}.volumes[1].persistentVolumeClaim.claimName",
        f"{pod}.containers[0].env[0].valueFrom.secretKeyRef.name",
        f"{pod}.containers[0].envFrom[0].configMapRef.name",
    }
    (claim,) = (f for f in checks.wrong if f.field.endswith("claimName"))
    assert 'persistentvolumeclaims "data" not found' in claim.message
    assert checks.unchecked == ()
    assert plane.api.items(JOBS.format(namespace)) == [], "nothing is created"


def test_a_job_that_the_cluster_would_take_has_no_finding(
    plane: ControlPlane, namespace: str
) -> None:
    assert checked(plane, namespace) == Checks()


def test_the_runtime_of_the_cluster_is_merged_and_its_needs_are_looked_up(
    plane: ControlPlane, namespace: str
) -> None:
    ref = {"name": "team", "kind": "TrainingRuntime"}
    (missing,) = checked(plane, namespace, runtimeRef=ref).wrong
    assert missing.field == "spec.runtimeRef"
    assert "there is no TrainingRuntime team" in missing.message
    body = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "team"},
        "spec": {"backoffLimit": 1, "template": template(serviceAccountName="of-the-team")},
    }
    plane.api.create(RUNTIMES.format(namespace), body)
    (account,) = checked(plane, namespace, runtimeRef=ref).wrong
    assert account.field == "spec.template.spec.serviceAccountName"
    (refused,) = checked(plane, namespace, runtimeRef=ref, backoffLimit=2).wrong
    assert "overrides 1 of TrainingRuntime team" in refused.message


def test_objects_that_the_user_may_not_read_are_reported_as_not_checked(
    plane: ControlPlane, namespace: str
) -> None:
    asked = template(volumes=[{"name": "a", "secret": {"secretName": "s"}}])
    checks = checked(plane, namespace, user="a-stranger", template=asked)
    assert checks.wrong == ()
    assert len(checks.unchecked) == 2, "the job itself, and the Secret"
    assert any("could not be looked up" in each.message for each in checks.unchecked)
