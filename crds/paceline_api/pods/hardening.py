"""Security settings of a pod where its template leaves them open (C6).

They are what a restricted namespace requires. A default never contradicts the template: a container
that is to run as root, with privileges or with further capabilities gets none of the settings that
would keep it from starting or from what it is for.

| the container says, or the pod for it   | runAsNonRoot | allowPrivilegeEscalation | capabilities |
|-----------------------------------------|--------------|--------------------------|--------------|
| nothing, a user but 0, or a group       | true         | false                    | drop ALL     |
| allowPrivilegeEscalation: true          | true         |                          |              |
| capabilities without further ones       | true         | false                    |              |
| further capabilities                    |              |                          |              |
| runAsUser: 0, or runAsNonRoot: false    |              |                          |              |
| privileged: true                        |              |                          |              |

The user of the container precedes that of the pod. An empty cell is left as the template has it.
Namespaces of the node (hostNetwork, hostPID, hostIPC) say nothing about the user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from paceline_api.pods.manifest import items_of, map_of
from paceline_api.pods.security import RESTRICTED_CAPABILITIES

USER: Final = ("runAsUser", "runAsGroup", "runAsNonRoot")
"""Fields of a securityContext that say as whom the processes of a container run."""


def harden(spec: dict[str, Any], *, root: Collection[Any] = ()) -> None:
    """Set what a restricted namespace requires where the template is silent, in place.

    Args:
        spec: Spec of the pod. A malformed part of it stays as it is, for the API server to refuse.
        root: Names of containers that may run as root although they do not say so themselves.
    """
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    pod = spec.setdefault("securityContext", {})
    if not isinstance(pod, dict):
        return
    pod.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    containers = [
        container
        for field in ("containers", "initContainers")
        for container in items_of(spec, field)
        if isinstance(container.setdefault("securityContext", {}), dict)
    ]
    says_user = "runAsNonRoot" in pod
    open_ = [c for c in containers if not may_be_root(pod, c) and c.get("name") not in root]
    if not says_user and len(open_) == len(containers) and pod.get("runAsUser") != 0:
        pod["runAsNonRoot"] = True
        says_user = True
    for container in open_:
        context = container["securityContext"]
        if not says_user:
            context.setdefault("runAsNonRoot", True)
        if context.get("allowPrivilegeEscalation") is not True:
            context.setdefault("capabilities", {"drop": ["ALL"]})
        context.setdefault("allowPrivilegeEscalation", False)
    for container in containers:
        if not container["securityContext"]:
            del container["securityContext"]


def may_be_root(pod: Mapping[str, Any], container: Mapping[str, Any]) -> bool:
    """Return True if a container is to run as root, or has privileges that only root can use.

    The kernel gives added capabilities to root's processes only.

    Args:
        pod: securityContext of the pod.
        container: The container.

    Returns:
        True if defaults for a container without privileges must not be set.
    """
    context = map_of(container, "securityContext")
    added = map_of(context, "capabilities").get("add")
    if context.get("privileged") or set(map(str, added or ())) - RESTRICTED_CAPABILITIES:
        return True
    user = context.get("runAsUser", pod.get("runAsUser"))
    if user is not None:
        return bool(user == 0)
    return context.get("runAsNonRoot", pod.get("runAsNonRoot")) is False


def user_of(
    template: Mapping[str, Any], container: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Return as whom a container runs, for another one with the same image.

    Args:
        template: Pod template of the container.
        container: The container.

    Returns:
        The fields of its own securityContext about its user, and True if it may be root.
    """
    context = map_of(container, "securityContext")
    root = may_be_root(map_of(template["spec"], "securityContext"), container)
    return {name: context[name] for name in USER if name in context}, root
