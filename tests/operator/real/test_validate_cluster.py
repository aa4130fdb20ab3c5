"""`paceline validate --cluster`: what a real API server would say, before anything is created."""

from __future__ import annotations

from typing import Any

import pytest
from paceline.jobs import places
from paceline.jobs.interface import Checks
from paceline_api.reading.load import job_from_mapping

from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import JOBS, until
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


def test_a_refused_pod_is_reported_with_the_field(plane: ControlPlane, namespace: str) -> None:
    """Pod security, a quota, and an unknown field; the settings that every pod gets count."""
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": enforce}})
    until(lambda: checked(plane, namespace, template=template(hostPID=True)).wrong, "the label")
    assert checked(plane, namespace) == Checks(), "a plain template has the settings by default"
    (refused,) = checked(plane, namespace, template=template(hostNetwork=True)).wrong
    assert 'violates PodSecurity "restricted:latest"' in refused.message
    assert refused.field == "spec.template"
    (typo,) = checked(plane, namespace, template=template(trainer={"resourcess": {}})).wrong
    assert "resourcess" in typo.message
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    plane.api.create(path, {"metadata": {"name": "few"}, "spec": {"hard": {"limits.cpu": "1"}}})
    until(lambda: plane.api.get(f"{path}/few").get("status", {}).get("hard"), "the quota counts")
    (quota,) = checked(plane, namespace).wrong
    assert "must specify limits.cpu for: trainer" in quota.message
    assert quota.field == "the resources of the containers in spec.template"
    assert plane.api.items(f"/api/v1/namespaces/{namespace}/pods") == []


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
    assert len(checks.unchecked) == 3, "the job itself, the Secret, and a worker's pod"
    assert any("could not be looked up" in each.message for each in checks.unchecked)
