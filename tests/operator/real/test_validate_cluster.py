"""`paceline validate --cluster`: what a real API server would say, before anything is created."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from paceline.jobs import places
from paceline.jobs.interface import Checks
from paceline_api.pods.quota import amount, usage
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


def set_quotas(plane: ControlPlane, namespace: str, specs: dict[str, dict[str, Any]]) -> str:
    """Create quotas, wait until they count, and return the path of their collection."""
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    for name, spec in specs.items():
        plane.api.create(path, {"metadata": {"name": name}, "spec": spec})
    until(
        lambda: all(each.get("status", {}).get("hard") for each in plane.api.items(path)),
        "the quotas count",
    )
    return path


def workers(**limits: str) -> dict[str, Any]:
    return template(trainer={"resources": {"limits": {"cpu": "4", "memory": "1Gi", **limits}}})


def test_each_quota_that_takes_one_pod_and_not_all_is_reported_with_its_numbers(
    plane: ControlPlane, namespace: str
) -> None:
    enough = {"limits.cpu": "9", "pods": "3", "requests.nvidia.com/gpu": "16", "memory": "2176Mi"}
    hard = {
        "enough": enough,
        "cpu": {"limits.cpu": "8500m"},
        "gpu": {"requests.nvidia.com/gpu": "8"},
        "memory": {"memory": "2Gi"},
        "number": {"count/pods": "2"},
    }
    set_quotas(plane, namespace, {name: {"hard": each} for name, each in hard.items()})
    job = workers(**{"nvidia.com/gpu": "8"})
    wrong = checked(plane, namespace, replicas=2, template=job).wrong
    together = "the pods of 2 workers and of the coordinator together: exceeded quota: "
    gpu = "requests.nvidia.com/gpu"
    assert [each.message.removeprefix(together) for each in wrong] == [
        "cpu, requested: limits.cpu=9, used: limits.cpu=0, limited: limits.cpu=8.5",
        f"gpu, requested: {gpu}=16, used: {gpu}=0, limited: {gpu}=8",
        "memory, requested: memory=2.125Gi, used: memory=0, limited: memory=2Gi",
        "number, requested: count/pods=3, used: count/pods=0, limited: count/pods=2",
    ]
    assert {each.field for each in wrong} == {"spec.replicas or the resources of spec.template"}
    assert plane.api.items(f"/api/v1/namespaces/{namespace}/pods") == []


def test_a_quota_counts_only_pods_in_its_scope_and_what_others_use(
    plane: ControlPlane, namespace: str
) -> None:
    def by_priority(operator: str, *values: str) -> dict[str, Any]:
        named: dict[str, Any] = {"scopeName": "PriorityClass", "operator": operator}
        named |= {"values": values} if values else {}
        return {"scopeSelector": {"matchExpressions": [named]}}

    scopes: dict[str, dict[str, Any]] = {
        "best-effort": {"scopes": ["BestEffort"]},
        "not-best-effort": {"scopes": ["NotBestEffort"]},
        "ending": {"scopes": ["Terminating"]},
        "not-ending": {"scopes": ["NotTerminating", "NotBestEffort"]},
        "across": {"scopes": ["CrossNamespacePodAffinity"]},
        "high": by_priority("In", "high"),
        "not-high": by_priority("NotIn", "high"),
        "any-priority": by_priority("Exists"),
        "no-priority": by_priority("DoesNotExist"),
        "of-three": {},
    }
    hard = {name: {"hard": {"pods": "2"}, **scope} for name, scope in scopes.items()}
    hard["of-three"]["hard"] = {"pods": "3"}
    path = set_quotas(plane, namespace, hard)

    def short() -> dict[str, str]:
        findings = checked(plane, namespace, replicas=2, template=workers()).wrong
        messages = (each.message.partition("exceeded quota: ")[2] for each in findings)
        return dict(each.split(", ", 1) for each in messages)

    matching = {"not-best-effort", "not-ending", "not-high", "no-priority"}
    assert set(short()) == matching
    other = {"schedulerName": "nobody", "containers": [{"name": "a", "image": "a"}]}
    body = {"metadata": {"name": "other"}, "spec": other}
    plane.api.create(f"/api/v1/namespaces/{namespace}/pods", body)
    until(
        lambda: plane.api.get(f"{path}/of-three")["status"]["used"]["pods"] == "1",
        "the other pod counts",
    )
    after = short()
    assert set(after) == {*matching, "of-three"}
    assert after["of-three"] == "requested: pods=3, used: pods=1, limited: pods=3"


def test_a_refusal_of_the_coordinators_pod_names_its_field(
    plane: ControlPlane, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/limitranges"
    limits = [{"type": "Container", "max": {"memory": "2Gi"}}]
    plane.api.create(path, {"metadata": {"name": "small"}, "spec": {"limits": limits}})
    own = {"resources": {"limits": {"cpu": "1", "memory": "4Gi"}}}

    def refusals() -> tuple[Any, ...]:
        return checked(plane, namespace, template=workers(), coordinator=own).wrong

    (refused,) = until(refusals, "the limit range holds")
    assert refused.message.startswith("the coordinator's pod: ")
    assert "maximum memory usage per Container is 2Gi" in refused.message
    assert refused.field == "spec.coordinator.resources"


def test_a_pod_takes_what_the_quota_controller_counts(plane: ControlPlane, namespace: str) -> None:
    """Init containers, sidecars, resources of the pod itself, devices, and defaults of requests."""

    def container(name: str, **resources: Any) -> dict[str, Any]:
        return {"name": name, "image": "a", "resources": resources}

    sidecar = container("side", limits={"cpu": "500m", "memory": "100M"})
    pods: dict[str, dict[str, Any]] = {
        "init": {
            "initContainers": [
                sidecar | {"restartPolicy": "Always"},
                container("big", limits={"cpu": "3", "memory": "1000Mi"}),
            ],
            "containers": [
                container("main", requests={"cpu": "0.25"}, limits={"cpu": "2", "memory": "1Gi"}),
                container("gpu", limits={"nvidia.com/gpu": "4", "cpu": "1", "memory": "2e6"}),
            ],
        },
        "whole": {
            "resources": {"limits": {"cpu": "6", "memory": "3Gi"}},
            "containers": [container("main", limits={"cpu": "1", "memory": "1Gi"})],
        },
        "pages": {
            "containers": [
                container(
                    "main",
                    limits={
                        "cpu": "1",
                        "memory": "1Gi",
                        "hugepages-2Mi": "8Mi",
                        "ephemeral-storage": "2G",
                    },
                )
            ],
        },
    }
    names = (
        *("cpu", "requests.cpu", "memory", "requests.memory", "limits.cpu", "limits.memory"),
        *("pods", "count/pods", "requests.nvidia.com/gpu", "hugepages-2Mi"),
        *("requests.hugepages-2Mi", "ephemeral-storage", "limits.ephemeral-storage"),
    )
    total: dict[str, Decimal] = dict.fromkeys(names, Decimal(0))
    path = set_quotas(plane, namespace, {"all": {"hard": dict.fromkeys(names, "1000Gi")}})
    for name, spec in pods.items():
        body = {"metadata": {"name": name}, "spec": {"schedulerName": "nobody", **spec}}
        stored = plane.api.create(f"/api/v1/namespaces/{namespace}/pods", body)
        for resource, value in usage(stored).items():
            if resource in total:
                total[resource] += value

    def counted() -> dict[str, str] | None:
        counts: dict[str, str] = plane.api.get(f"{path}/all")["status"]["used"]
        return counts if counts["pods"] == str(len(pods)) else None

    used = until(counted, "all pods count")
    assert {name: amount(used[name]) for name in names} == total
