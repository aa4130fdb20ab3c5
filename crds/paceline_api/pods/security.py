"""The Pod Security Standards, as far as the pods of a TrainingJob can violate them.

A tenant writes the template and the operator creates the pods. A cluster that exempts the operator
from pod security, or turns its admission off, would thereby exempt every tenant. The operator
therefore always holds a pod to the level of its namespace, and names the field that violates it
(C20).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

from paceline_api.pods.manifest import indexed, map_of

LABEL: Final = "pod-security.kubernetes.io/enforce"
"""Label of a namespace that names its level."""
APP_ARMOR: Final = "container.apparmor.security.beta.kubernetes.io/"
"""Prefix of the annotations that set an AppArmor profile."""
CONTAINERS: Final = ("containers", "initContainers", "ephemeralContainers")
HOST: Final = ("hostNetwork", "hostPID", "hostIPC")
PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe")
HOOKS: Final = ("postStart", "preStop")

BASELINE_CAPABILITIES: Final = frozenset(
    (
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    )
)
RESTRICTED_CAPABILITIES: Final = frozenset({"NET_BIND_SERVICE"})
SELINUX_TYPES: Final = frozenset(
    {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
)
SYSCTLS: Final = frozenset(
    (
        *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range"),
        *("net.ipv4.ip_local_reserved_ports", "net.ipv4.ip_unprivileged_port_start"),
        *("net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout"),
        *("net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes"),
        *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_rmem"),
        *("net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem"),
    )
)
VOLUMES: Final = frozenset(
    (
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
        *("persistentVolumeClaim", "projected", "secret"),
    )
)
PROFILES: Final = ("RuntimeDefault", "Localhost")


class Level(StrEnum):
    """Levels of the Pod Security Standards."""

    PRIVILEGED = "privileged"
    BASELINE = "baseline"
    RESTRICTED = "restricted"


def level_of(labels: Mapping[str, str]) -> Level:
    """Return the level of a namespace.

    An unknown level counts as the strictest, as it does for the API server.

    Args:
        labels: Labels of the namespace.

    Returns:
        The level.
    """
    text = labels.get(LABEL, Level.PRIVILEGED)
    return Level(text) if text in tuple(Level) else Level.RESTRICTED


def violations(pod: Mapping[str, Any], level: Level) -> list[str]:
    """List what a pod must not have at a level.

    Args:
        pod: Manifest of the pod.
        level: Level of its namespace.

    Returns:
        One text for each violation, with the field and what it must be; empty if the pod may be
        made.
    """
    if level is Level.PRIVILEGED:
        return []
    broken = [*_baseline(pod)]
    if level is Level.RESTRICTED:
        broken += _restricted(pod)
    return broken


# ---- baseline -----------------------------------------------------------------------------------


def _baseline(pod: Mapping[str, Any]) -> Iterator[str]:
    spec = pod["spec"]
    for name in HOST:
        if spec.get(name):
            yield f"spec.{name} must not be true"
    for index, volume in indexed(spec, "volumes"):
        if volume.get("hostPath") is not None:
            yield f"spec.volumes[{index}] must not be a hostPath"
    for index, sysctl in indexed(map_of(spec, "securityContext"), "sysctls"):
        if sysctl.get("name") not in SYSCTLS:
            yield f"spec.securityContext.sysctls[{index}] must not set {sysctl.get('name')}"
    for path, context in _contexts(spec):
        yield from _of_context(path, context)
    for path, container in _containers(spec):
        yield from _of_container(path, container)
    for name, value in map_of(pod.get("metadata") or {}, "annotations").items():
        if name.startswith(APP_ARMOR) and not _is_profile(str(value)):
            yield f"metadata.annotations[{name}] must be runtime/default or localhost/..."


def _is_profile(value: str) -> bool:
    return value in ("", "runtime/default") or value.startswith("localhost/")


def _of_context(path: str, context: Mapping[str, Any]) -> Iterator[str]:
    """Yield the violations that a securityContext of a pod or of a container can have."""
    if map_of(context, "windowsOptions").get("hostProcess"):
        yield f"{path}.windowsOptions.hostProcess must not be true"
    selinux = map_of(context, "seLinuxOptions")
    if (selinux.get("type") or "") not in SELINUX_TYPES:
        yield f"{path}.seLinuxOptions.type must be a type of containers"
    for name in ("user", "role"):
        if selinux.get(name):
            yield f"{path}.seLinuxOptions.{name} must not be set"
    for name in ("appArmorProfile", "seccompProfile"):
        profile = map_of(context, name)
        if profile and profile.get("type") not in PROFILES:
            yield f"{path}.{name}.type must be RuntimeDefault or Localhost"


def _of_container(path: str, container: Mapping[str, Any]) -> Iterator[str]:
    context = map_of(container, "securityContext")
    if context.get("privileged"):
        yield f"{path}.securityContext.privileged must not be true"
    if context.get("procMount") not in (None, "", "Default"):
        yield f"{path}.securityContext.procMount must be Default"
    for name in _strings(map_of(context, "capabilities"), "add"):
        if name not in BASELINE_CAPABILITIES:
            yield f"{path}.securityContext.capabilities.add must not have {name}"
    for index, port in indexed(container, "ports"):
        if port.get("hostPort"):
            yield f"{path}.ports[{index}].hostPort must not be set"
    for name, action in _actions(container):
        for kind in ("httpGet", "tcpSocket"):
            if map_of(action, kind).get("host"):
                yield f"{path}.{name}.{kind}.host must not be set"


def _actions(container: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in PROBES:
        yield name, map_of(container, name)
    for name in HOOKS:
        yield f"lifecycle.{name}", map_of(map_of(container, "lifecycle"), name)


# ---- restricted ---------------------------------------------------------------------------------


def _restricted(pod: Mapping[str, Any]) -> Iterator[str]:
    spec = pod["spec"]
    for index, volume in indexed(spec, "volumes"):
        kinds = {name for name, value in volume.items() if name != "name" and value is not None}
        for name in sorted(kinds - VOLUMES - {"hostPath"}):
            yield f"spec.volumes[{index}] must not be of the kind {name}"
    for path, context in _contexts(spec):
        if context.get("runAsUser") == 0:
            yield f"{path}.runAsUser must not be 0"
    of_pod = map_of(spec, "securityContext")
    if of_pod.get("runAsNonRoot") is False:
        yield "spec.securityContext.runAsNonRoot must be true"
    for path, container in _containers(spec):
        context = map_of(container, "securityContext")
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{path}.securityContext.allowPrivilegeEscalation must be false"
        if not _own_or(context, of_pod, "runAsNonRoot"):
            yield f"{path}.securityContext.runAsNonRoot must be true"
        if not _own_or(context, of_pod, "seccompProfile"):
            yield f"{path}.securityContext.seccompProfile must be RuntimeDefault or Localhost"
        capabilities = map_of(context, "capabilities")
        if "ALL" not in _strings(capabilities, "drop"):
            yield f"{path}.securityContext.capabilities.drop must have ALL"
        for name in _strings(capabilities, "add"):
            if name in BASELINE_CAPABILITIES - RESTRICTED_CAPABILITIES:
                yield f"{path}.securityContext.capabilities.add must not have {name}"


def _own_or(context: Mapping[str, Any], of_pod: Mapping[str, Any], name: str) -> Any:
    own = context.get(name)
    return of_pod.get(name) if own is None else own


# ---- a manifest as a user wrote it --------------------------------------------------------------


def _contexts(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "spec.securityContext", map_of(spec, "securityContext")
    for path, container in _containers(spec):
        yield f"{path}.securityContext", map_of(container, "securityContext")


def _containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in CONTAINERS:
        for index, container in indexed(spec, kind):
            yield f"spec.{kind}[{index}]", container


def _strings(where: Mapping[str, Any], name: str) -> list[str]:
    value = where.get(name)
    return [str(item) for item in value] if isinstance(value, list | tuple) else []
