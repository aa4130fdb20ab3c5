"""The tenant policy of the chart, enforced by a real API server.

A job is refused when its author writes it, because its pods are created by the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testing.cluster.api import ApiError
from testing.cluster.commands import helm
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import JOBS, ROOT, until
from testing.fake_cluster.parts import job_body

pytestmark = pytest.mark.processes

POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
OPTIONS = (
    "--set=tenantPolicy.enabled=true,tenantPolicy.namespaceSelector.matchLabels.group=tenants",
    "--set=tenantPolicy.capabilities={SYS_NICE},tenantPolicy.fabricProfiles={aws-efa}",
)


@pytest.fixture(scope="module")
def system(plane: ControlPlane) -> Iterator[str]:
    """Install the chart with the policy enabled, and yield its namespace."""
    with plane.namespace("system") as system:
        helm(
            *(plane.kubeconfig, "install", "paceline", str(ROOT / "charts/paceline")),
            *("-n", system, *OPTIONS),
        )
        yield system
        helm(plane.kubeconfig, "uninstall", "paceline", "-n", system)


@pytest.fixture(scope="module")
def tenant(plane: ControlPlane, system: str) -> Iterator[str]:
    """Yield a namespace that the policy's selector matches."""
    with plane.namespace("tenant") as namespace:
        label(plane, namespace, "tenants")
        until(lambda: refusal(plane, namespace, pod(hostNetwork=True)), f"in force, of {system}")
        yield namespace


def label(plane: ControlPlane, namespace: str, group: str) -> None:
    path = f"/api/v1/namespaces/{namespace}"
    plane.api.patch(path, {"metadata": {"labels": {"group": group}}})


def refusal(plane: ControlPlane, namespace: str, body: dict[str, Any]) -> str:
    """Return the API server's message, or an empty string if it accepts."""
    try:
        plane.api.create(JOBS.format(namespace) + "?dryRun=All&fieldValidation=Strict", body)
    except ApiError as error:
        return error.reason
    return ""


def pod(**spec: Any) -> dict[str, Any]:
    body = job_body()
    body["spec"]["template"]["spec"] |= spec
    return body


def trainer(**container: Any) -> dict[str, Any]:
    body = job_body()
    body["spec"]["template"]["spec"]["containers"][0] |= container
    return body


def beside(field: str, **container: Any) -> dict[str, Any]:
    """Return a job whose pods have one more container in `field`."""
    body = job_body()
    more = {"name": "more", "image": "more:1", **container}
    body["spec"]["template"]["spec"].setdefault(field, []).append(more)
    return body


def context(**fields: Any) -> dict[str, Any]:
    return {"securityContext": fields}


UNCONFINED = {"type": "Unconfined"}
APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/trainer"


def annotated(value: str) -> dict[str, Any]:
    body = job_body()
    body["spec"]["template"]["metadata"] = {"annotations": {APP_ARMOR: value, "note": "unconfined"}}
    return body


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "host network": (pod(hostNetwork=True), "spec.hostNetwork is not for tenants; remove it"),
    "host network, of a wrong type": (pod(hostNetwork="yes"), "spec.hostNetwork is not"),
    "host PIDs": (pod(hostPID=True), "spec.hostPID is not for tenants; remove it"),
    "host IPC": (pod(hostIPC=True), "spec.hostIPC is not for tenants; remove it"),
    "a path of the node": (
        pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/"}}]),
        "has a hostPath",
    ),
    "a port of the node": (
        trainer(ports=[{"containerPort": 80}, {"containerPort": 81, "hostPort": 81}]),
        "hostPort",
    ),
    "privileged": (trainer(**context(privileged=True)), "is privileged"),
    "another container": (beside("containers", **context(privileged=True)), "is privileged"),
    "an init container": (beside("initContainers", **context(privileged=True)), "is privileged"),
    "a sidecar": (
        beside("initContainers", restartPolicy="Always", **context(privileged=True)),
        "is privileged",
    ),
    "a capability": (
        trainer(**context(capabilities={"drop": ["ALL"], "add": ["SYS_NICE", "SYS_ADMIN"]})),
        "but for SYS_NICE",
    ),
    "/proc": (trainer(**context(procMount="Unmasked")), "procMount"),
    "SELinux": (pod(**context(seLinuxOptions={"type": "spc_t"})), "seLinuxOptions"),
    "seccomp, of the pod": (pod(**context(seccompProfile=UNCONFINED)), "use RuntimeDefault"),
    "seccomp": (trainer(**context(seccompProfile=UNCONFINED)), "use RuntimeDefault"),
    "AppArmor": (pod(**context(appArmorProfile=UNCONFINED)), "AppArmor"),
    "AppArmor, as an annotation": (annotated("unconfined"), "AppArmor"),
    "a process of a Windows host": (
        pod(**context(windowsOptions={"hostProcess": True})),
        "hostProcess",
    ),
    "a fabric profile": (
        job_body(fabric={"profile": "azure-ib"}),
        "tenants have auto with nothing required, or profile tcp, template, aws-efa;",
    ),
    "whatever carries RDMA": (job_body(fabric={"required": "RDMA"}), "name one of them"),
    "what cannot be evaluated": (pod(volumes="none"), "resulted in error"),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "nothing said": job_body(),
    "said that not": pod(hostNetwork=False, hostPID=False, hostIPC=False),
    "a restricted pod": pod(
        **context(runAsNonRoot=True, runAsUser=1000, seccompProfile={"type": "RuntimeDefault"})
    ),
    "a restricted container": trainer(
        **context(
            privileged=False,
            allowPrivilegeEscalation=False,
            capabilities={"drop": ["ALL"], "add": ["SYS_NICE"]},
            procMount="Default",
        )
    ),
    "ports": trainer(ports=[{"containerPort": 80}, {"containerPort": 81, "hostPort": 0}]),
    "a claim": pod(volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]),
    "empty words of YAML": pod(volumes=None, securityContext=None, initContainers=None),
    "empty words in a container": trainer(securityContext=None, ports=None),
    "a sidecar": beside("initContainers", restartPolicy="Always"),
    "AppArmor of the runtime": annotated("runtime/default"),
    "tcp": job_body(fabric={"profile": "tcp"}),
    "template": job_body(fabric={"profile": "template"}),
    "nothing required": job_body(fabric={"required": "Any"}),
    "a profile that is theirs": job_body(fabric={"profile": "aws-efa", "required": "RDMA"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_jobs_that_violate_the_tenant_policy_are_refused(
    plane: ControlPlane, tenant: str, name: str
) -> None:
    body, words = REFUSED[name]
    message = refusal(plane, tenant, body)
    assert "ValidatingAdmissionPolicy" in message, message
    assert words in message


@pytest.mark.parametrize("name", ACCEPTED)
def test_jobs_that_satisfy_the_tenant_policy_are_accepted(
    plane: ControlPlane, tenant: str, name: str
) -> None:
    assert refusal(plane, tenant, ACCEPTED[name]) == ""


def test_other_namespaces_are_not_subject_to_the_policy(
    plane: ControlPlane, tenant: str, namespace: str
) -> None:
    assert tenant != namespace
    for body, _ in list(REFUSED.values())[:-1]:
        assert "ValidatingAdmissionPolicy" not in refusal(plane, namespace, body)


def test_the_policy_passes_the_type_check_of_the_api_server(
    plane: ControlPlane, system: str, tenant: str
) -> None:
    """The check uses the definition of a TrainingJob."""
    path = f"{POLICIES}/{system}-paceline-operator-tenants"
    assert tenant

    def checked(policy: dict[str, Any]) -> bool:
        status = policy.get("status", {})
        return bool(status.get("observedGeneration") == policy["metadata"]["generation"])

    stored = plane.api.wait(path, checked, 60.0, "checked")
    assert not stored["status"].get("typeChecking", {}).get("expressionWarnings")


def test_an_older_job_can_be_suspended_scaled_and_deleted(
    plane: ControlPlane, tenant: str, namespace: str
) -> None:
    """The template of an old job cannot be changed, unless it then satisfies the policy."""
    body = pod(hostNetwork=True)
    body["spec"]["suspend"] = True
    body["metadata"]["finalizers"] = ["example.com/wait"]
    path = f"{JOBS.format(namespace)}/digits"
    plane.api.create(JOBS.format(namespace), body)
    label(plane, namespace, "tenants")
    until(lambda: refusal(plane, namespace, pod(hostPID=True)), "the policy holds here too")
    plane.api.patch(path, {"spec": {"suspend": False}})
    plane.api.patch(path, {"spec": {"suspend": True}})
    plane.api.patch(f"{path}/scale", {"spec": {"replicas": 3}})
    for change in ({"hostPID": True}, {"terminationGracePeriodSeconds": 9}):
        with pytest.raises(ApiError, match="hostNetwork is not for tenants"):
            plane.api.patch(path, {"spec": {"template": {"spec": change}}})
    plane.api.delete(path)
    plane.api.patch(path, {"metadata": {"finalizers": None}})
    plane.api.wait_gone(path, 20)


def test_a_job_cannot_be_changed_to_violate_the_policy(plane: ControlPlane, tenant: str) -> None:
    path = f"{JOBS.format(tenant)}/changed"
    plane.api.create(JOBS.format(tenant), job_body("changed", suspend=True))
    with pytest.raises(ApiError, match="hostPID is not for tenants"):
        plane.api.patch(path, {"spec": {"template": {"spec": {"hostPID": True}}}})
    plane.api.delete(path)
