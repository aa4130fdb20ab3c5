"""Templates with every way to say as whom their containers run, and what their pods get.

They are data, since the same table is tested on the manifests and on the API server.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from testing.fake_cluster.parts import job_body

ROOT = {"runAsUser": 0}
ADDED = {"capabilities": {"add": ["IPC_LOCK"]}}
ALL: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
"""Defaults of a container whose pod has the default about its user."""
OWN = {**ALL, "runAsNonRoot": True}
"""Defaults of a container beside another one that may be root."""
SECCOMP = {"seccompProfile": {"type": "RuntimeDefault"}}
POD = {**SECCOMP, "runAsNonRoot": True}
"""Defaults of a pod none of whose containers may be root."""


class Row(NamedTuple):
    """What a template says, and the securityContext of its pod and of its containers."""

    pod: dict[str, Any]
    trainer: dict[str, Any] | None
    expected_pod: dict[str, Any]
    expected_trainer: dict[str, Any] | None
    level: str
    """Strictest level of pod security at which the pods are admitted."""
    more: tuple[str, dict[str, Any]] = ("", {})
    """List of another container, and its securityContext."""
    expected_more: dict[str, Any] | None = None
    spec: dict[str, Any] = {}  # noqa: RUF012 - a named tuple is never changed
    """Further fields of the pod."""

    @property
    def body(self) -> dict[str, Any]:
        """The job with this template."""
        body = job_body()
        spec = body["spec"]["template"]["spec"]
        spec |= self.spec
        if self.pod:
            spec["securityContext"] = self.pod
        if self.trainer is not None:
            spec["containers"][0]["securityContext"] = self.trainer
        kind, context = self.more
        if kind:
            more = {"name": "more", "image": "more:1", "securityContext": context}
            more |= {"restartPolicy": "Always"} if kind == "native sidecar" else {}
            field = "containers" if kind == "containers" else "initContainers"
            spec.setdefault(field, []).append(more)
        return body


ROWS: dict[str, Row] = {
    "nothing": Row({}, None, POD, ALL, "restricted"),
    "an empty context": Row({}, {}, POD, ALL, "restricted"),
    "a user": Row({}, {"runAsUser": 1000}, POD, {**ALL, "runAsUser": 1000}, "restricted"),
    "a group alone": Row({}, {"runAsGroup": 0}, POD, {**ALL, "runAsGroup": 0}, "restricted"),
    "a user and group of the pod": Row(
        {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 0},
        None,
        {**POD, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 0},
        ALL,
        "restricted",
    ),
    "root": Row({}, ROOT, SECCOMP, ROOT, "baseline"),
    "root in the pod": Row(ROOT, None, {**SECCOMP, **ROOT}, None, "baseline"),
    "root in the pod, a user in the container": Row(
        ROOT,
        {"runAsUser": 1000},
        {**SECCOMP, **ROOT},
        {**OWN, "runAsUser": 1000},
        "baseline",
    ),
    "a user in the pod, root in the container": Row(
        {"runAsUser": 1000}, ROOT, {**SECCOMP, "runAsUser": 1000}, ROOT, "baseline"
    ),
    "root is allowed": Row(
        {}, {"runAsNonRoot": False}, SECCOMP, {"runAsNonRoot": False}, "baseline"
    ),
    "root is allowed in the pod": Row(
        {"runAsNonRoot": False}, None, {**SECCOMP, "runAsNonRoot": False}, None, "baseline"
    ),
    "root is allowed in the pod, a user in the container": Row(
        {"runAsNonRoot": False},
        {"runAsUser": 7},
        {**SECCOMP, "runAsNonRoot": False},
        {**ALL, "runAsUser": 7},
        "baseline",
    ),
    "not root, said in the pod": Row({"runAsNonRoot": True}, None, POD, ALL, "restricted"),
    "not root, said in the container": Row(
        {}, {"runAsNonRoot": True}, POD, {**ALL, "runAsNonRoot": True}, "restricted"
    ),
    "privileged": Row({}, {"privileged": True}, SECCOMP, {"privileged": True}, "privileged"),
    "privileged, with a user": Row(
        {},
        {"privileged": True, "runAsUser": 1000},
        SECCOMP,
        {"privileged": True, "runAsUser": 1000},
        "privileged",
    ),
    "not privileged": Row(
        {}, {"privileged": False}, POD, {**ALL, "privileged": False}, "restricted"
    ),
    "a capability": Row({}, ADDED, SECCOMP, ADDED, "privileged"),
    "the capability that excludes no escalation": Row(
        {},
        {"capabilities": {"add": ["CAP_SYS_ADMIN"]}},
        SECCOMP,
        {"capabilities": {"add": ["CAP_SYS_ADMIN"]}},
        "privileged",
    ),
    "a capability of restricted pods": Row(
        {},
        {"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}},
        POD,
        {
            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
            "allowPrivilegeEscalation": False,
        },
        "restricted",
    ),
    "some capabilities dropped": Row(
        {},
        {"capabilities": {"drop": ["NET_RAW"]}},
        POD,
        {"capabilities": {"drop": ["NET_RAW"]}, "allowPrivilegeEscalation": False},
        "baseline",
    ),
    "escalation": Row(
        {},
        {"allowPrivilegeEscalation": True},
        POD,
        {"allowPrivilegeEscalation": True},
        "baseline",
    ),
    "another seccomp profile": Row(
        {"seccompProfile": {"type": "Unconfined"}},
        None,
        {"seccompProfile": {"type": "Unconfined"}, "runAsNonRoot": True},
        ALL,
        "privileged",
    ),
    "the network of the node": Row(
        {}, None, POD, ALL, "privileged", spec={"hostNetwork": True, "hostPID": True}
    ),
    "an IPC namespace of the node": Row({}, None, POD, ALL, "privileged", spec={"hostIPC": True}),
    "users of its own": Row({}, None, POD, ALL, "restricted", spec={"hostUsers": False}),
    "a root init container": Row(
        {}, None, SECCOMP, OWN, "baseline", ("initContainers", ROOT), ROOT
    ),
    "a privileged init container": Row(
        {},
        {"runAsUser": 1000},
        SECCOMP,
        {**OWN, "runAsUser": 1000},
        "privileged",
        ("initContainers", {"privileged": True}),
        {"privileged": True},
    ),
    "an init container without a word": Row(
        {}, ROOT, SECCOMP, ROOT, "baseline", ("initContainers", {}), OWN
    ),
    "a root sidecar": Row({}, None, SECCOMP, OWN, "baseline", ("containers", ROOT), ROOT),
    "a native sidecar with a capability": Row(
        {}, None, SECCOMP, OWN, "privileged", ("native sidecar", ADDED), ADDED
    ),
    "a sidecar with a user beside root": Row(
        ROOT,
        None,
        {**SECCOMP, **ROOT},
        None,
        "baseline",
        ("containers", {"runAsUser": 65534}),
        {**OWN, "runAsUser": 65534},
    ),
}
