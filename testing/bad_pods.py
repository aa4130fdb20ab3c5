"""Pods that each violate one control of the Pod Security Standards, and pods that violate none."""

from __future__ import annotations

import copy
from typing import Any

GOOD = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
UNCONFINED = {"type": "Unconfined"}
APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/trainer"


def pod(**spec: Any) -> dict[str, Any]:
    """Return a pod that violates nothing, changed by these fields of its spec."""
    container = {"name": "trainer", "image": "x", "securityContext": copy.deepcopy(GOOD)}
    return {"metadata": {}, "spec": {"containers": [container], **spec}}


def context(**fields: Any) -> dict[str, Any]:
    """Return a good pod with a changed securityContext of its container; None removes a field."""
    made = pod()
    of = made["spec"]["containers"][0]["securityContext"]
    of.update(fields)
    for name in [name for name, value in of.items() if value is None]:
        del of[name]
    return made


def container(**fields: Any) -> dict[str, Any]:
    """Return a good pod with changed fields of its container."""
    made = pod()
    made["spec"]["containers"][0].update(fields)
    return made


def beside(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a good pod with one more container of this kind."""
    more = {"name": "more", "image": "x", "securityContext": {**copy.deepcopy(GOOD), **fields}}
    made = pod()
    made["spec"].setdefault(kind, []).append(more)
    return made


def annotated(value: str) -> dict[str, Any]:
    """Return a good pod with this annotation for AppArmor."""
    return {**pod(), "metadata": {"annotations": {APP_ARMOR: value}}}


BROKEN_BASELINE: dict[str, tuple[dict[str, Any], str]] = {
    "host network": (pod(hostNetwork=True), "spec.hostNetwork"),
    "host PIDs": (pod(hostPID=True), "spec.hostPID"),
    "host IPC": (pod(hostIPC=True), "spec.hostIPC"),
    "a path of the node": (
        pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/"}}]),
        "spec.volumes[1]",
    ),
    "privileged": (context(privileged=True), "spec.containers[0].securityContext.privileged"),
    "another container": (beside("containers", privileged=True), "spec.containers[1]."),
    "an init container": (beside("initContainers", privileged=True), "spec.initContainers[0]."),
    "a debug container": (
        beside("ephemeralContainers", privileged=True),
        "spec.ephemeralContainers[0].",
    ),
    "a capability": (
        context(capabilities={"drop": ["ALL"], "add": ["CHOWN", "SYS_ADMIN"]}),
        "capabilities.add must not have SYS_ADMIN",
    ),
    "all capabilities": (context(capabilities={"drop": ["ALL"], "add": ["ALL"]}), "have ALL"),
    "a port of the node": (
        container(ports=[{"containerPort": 80}, {"containerPort": 81, "hostPort": 81}]),
        "ports[1].hostPort",
    ),
    "/proc": (context(procMount="Unmasked"), "procMount"),
    "SELinux's type": (context(seLinuxOptions={"type": "spc_t"}), "seLinuxOptions.type"),
    "SELinux's user": (context(seLinuxOptions={"user": "u"}), "seLinuxOptions.user"),
    "SELinux's role": (
        pod(securityContext={"seLinuxOptions": {"role": "r"}}),
        "seLinuxOptions.role",
    ),
    "seccomp": (context(seccompProfile=UNCONFINED), "containers[0].securityContext.seccompProfile"),
    "seccomp of the pod": (
        pod(securityContext={"seccompProfile": UNCONFINED}),
        "spec.securityContext.seccompProfile",
    ),
    "AppArmor": (pod(securityContext={"appArmorProfile": UNCONFINED}), "appArmorProfile"),
    "AppArmor of a container": (context(appArmorProfile=UNCONFINED), "appArmorProfile"),
    "AppArmor as an annotation": (annotated("unconfined"), "metadata.annotations"),
    "a sysctl": (
        pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
        "kernel.msgmax",
    ),
    "a process of a Windows host": (
        context(windowsOptions={"hostProcess": True}),
        "windowsOptions.hostProcess",
    ),
    "a Windows host, of the pod": (
        pod(securityContext={"windowsOptions": {"hostProcess": True}}),
        "spec.securityContext.windowsOptions",
    ),
    "a probe of another host": (
        container(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
        "livenessProbe.httpGet.host",
    ),
    "a hook at another host": (
        container(lifecycle={"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 80}}}),
        "lifecycle.preStop.tcpSocket.host",
    ),
}
BROKEN_RESTRICTED: dict[str, tuple[dict[str, Any], str]] = {
    "a kind of volume": (
        pod(volumes=[{"name": "a", "nfs": {"server": "x", "path": "/"}}]),
        "spec.volumes[0] must not be of the kind nfs",
    ),
    "may escalate": (context(allowPrivilegeEscalation=None), "allowPrivilegeEscalation"),
    "escalates": (context(allowPrivilegeEscalation=True), "allowPrivilegeEscalation"),
    "may be root": (context(runAsNonRoot=None), "runAsNonRoot"),
    "is root": (context(runAsNonRoot=False), "runAsNonRoot"),
    "is root by its number": (context(runAsUser=0), "runAsUser"),
    "is root, says the pod": (
        pod(securityContext={"runAsUser": 0}),
        "spec.securityContext.runAsUser",
    ),
    "no seccomp": (context(seccompProfile=None), "seccompProfile"),
    "keeps capabilities": (context(capabilities=None), "capabilities.drop"),
    "keeps some": (context(capabilities={"drop": ["CHOWN"]}), "capabilities.drop"),
    "a capability of baseline": (
        context(capabilities={"drop": ["ALL"], "add": ["CHOWN"]}),
        "must not have CHOWN",
    ),
    "an init container": (beside("initContainers", runAsNonRoot=False), "initContainers[0]"),
}
ALLOWED: dict[str, dict[str, Any]] = {
    "nothing said that matters": pod(hostNetwork=False, hostPID=None),
    "ports": container(ports=[{"containerPort": 80, "hostPort": 0}]),
    "the one capability": context(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
    "SELinux of containers": context(seLinuxOptions={"type": "container_t", "level": "s0"}),
    "AppArmor of the runtime": annotated("runtime/default"),
    "AppArmor of the node": annotated("localhost/mine"),
    "a safe sysctl": pod(
        securityContext={"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}
    ),
    "seccomp of the node": context(seccompProfile={"type": "Localhost", "localhostProfile": "x"}),
    "volumes": pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "secret": {}}]),
    "a probe of itself": container(livenessProbe={"httpGet": {"port": 80}}),
    "empty words of YAML": pod(volumes=None, securityContext=None, initContainers=None),
}
