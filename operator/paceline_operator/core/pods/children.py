"""The manifests of a job's worker pods, its coordinator pod and its Secret.

A worker's pod is the user's template with as little added as possible: the agent as its command,
the agent's variables, memory for /dev/shm, placement, and the settings of a restricted pod where
the template leaves them open (C6). The coordinator runs in the trainer's image (C14).
"""

from __future__ import annotations

import base64
import copy
import itertools
from collections.abc import Mapping
from typing import Any, Final

from paceline_api import names
from paceline_api.jobfile import JOB_FILE
from paceline_api.pods.coordinator import COORDINATOR, coordinator_spec
from paceline_api.pods.hardening import harden
from paceline_api.pods.inherited import annotations_of, labels_of
from paceline_api.pods.manifest import items_of
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import Autoscaler
from paceline_api.types.job import API_VERSION, KIND
from paceline_api.types.template import TRAINER

from paceline_operator.core.job import JobObject
from paceline_operator.core.keys import JobKeys
from paceline_operator.core.pods import placement
from paceline_operator.core.pods.fabric import ChosenFabric, equip
from paceline_operator.core.pods.frozen import file_id, job_file

ENV_VERSION_NOW: Final = "1"
"""Version of the environment variables that the operator sets."""
FILES: Final = "/etc/paceline"
"""Folder in which pods find the files of the job's Secret."""
TOKEN: Final = "token"
OPERATOR_TOKEN: Final = "operator-token"
CERTIFICATE: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"
CALLERS: Final = "callers.crt"
"""Field with the certificate of the authority that signs those of the coordinator's callers."""
AGENT_CERTIFICATE: Final = "agent.crt"
AGENT_KEY: Final = "agent.key"
TOKENS_FOLDER: Final = "/etc/paceline-tokens"
TOKENS: Final = "tokens"
"""Field of the Secret that replaces the token of the agents."""
LINGER_S: Final = 30 * 24 * 3600
"""Seconds that a coordinator keeps the outcome for an operator that is away (C1)."""
GRACE_MARGIN_S: Final = 15
"""Seconds for the agent itself to exit, after its ranks had drainGraceSeconds."""
COORDINATOR_GRACE_S: Final = 30
"""Seconds that the coordinator of a deleted job stays until the ranks have left in order (C5)."""
METRICS_PORT: Final = "metrics"
METRICS_PORT_ELSE: Final = "paceline"
"""Name of the port of metrics if the template has another port with the usual name."""


def labels(job: JobObject, role: str) -> dict[str, str]:
    """Return the labels of a job's objects; `role` is the component."""
    return {
        "app.kubernetes.io/name": "paceline",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": "paceline-operator",
        names.LABEL_JOB: job.name,
        names.LABEL_ROLE: role,
        names.LABEL_MANAGER: names.manager_label(job.manager),
    }


def owner_reference(job: JobObject) -> dict[str, Any]:
    """Return the reference of a job's objects to the job.

    It has `controller`, because kubectl drain requires one. It does not block the deletion of the
    owner, since the operator may be away.

    Args:
        job: The job.

    Returns:
        One entry of metadata.ownerReferences.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def worker(
    job: JobObject,
    slot: int,
    attempt: int,
    *,
    key_id: str,
    file: str = "",
    coordinators: tuple[str, ...] = (),
    notes: Mapping[str, str] | None = None,
    avoid: tuple[str, ...] = (),
    fabric: ChosenFabric | None = None,
) -> dict[str, Any]:
    """Return the manifest of a worker's pod.

    Args:
        job: A job with a valid spec; its template is copied.
        slot: Slot of the pod.
        attempt: Attempt of the pod, which makes its name unique (C3).
        key_id: Id of the operator's key whose Secret the pod mounts.
        file: Digest of the job file in that Secret; empty for the present one.
        coordinators: Further addresses at which the agent may find the coordinator.
        notes: Annotations to add.
        avoid: Nodes on which the pod must not run.
        fabric: Fabric profile to add; None adds nothing.

    Returns:
        The manifest.
    """
    assert job.spec is not None
    assert job.settings is not None
    file = file or file_id(job)
    mounted = names.secret_name(job.name, job.uid, key_id, file)
    template = copy.deepcopy(dict(job.template))
    spec = template["spec"]
    container = next(c for c in spec["containers"] if c["name"] == TRAINER)
    container["command"] = ["python3", "-m", "paceline.agent"]
    container.pop("args", None)
    if not str(container.get("workingDir", "/")).startswith("/"):
        del container["workingDir"]  # a relative path is for local runs, relative to the job file
    container["env"] = [
        *_worker_env(job, slot, attempt, mounted, coordinators),
        *container.get("env", ()),
    ]
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _open_metrics(container, job.settings.metrics_port)
    files = [JOB_FILE, CERTIFICATE, AGENT_CERTIFICATE, AGENT_KEY]
    _mount(spec, container, "paceline-job", FILES, _job_volume(mounted, files))
    _mount(spec, container, "paceline-tokens", TOKENS_FOLDER, _tokens_volume(job))
    _mount(spec, container, "paceline-run", names.POD_RUN_DIR, {"emptyDir": {}})
    _mount(spec, container, "paceline-shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
    checkpoint = job.spec.checkpoint
    if checkpoint and checkpoint.claim_name:
        claim = {"persistentVolumeClaim": {"claimName": checkpoint.claim_name}}
        _mount(spec, container, "paceline-checkpoints", checkpoint.path, claim)
    spec["restartPolicy"] = "Never"
    spec.setdefault("terminationGracePeriodSeconds", drain_grace_s(job) + GRACE_MARGIN_S)
    if fabric is not None:
        equip(template, container, fabric)
    if spec.get("hostNetwork") and spec.get("dnsPolicy") is None:
        # The default would be the node's names alone, without that of the coordinator.
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    harden(spec)
    placement.spread(spec, job, avoid=avoid)
    metadata = _worker_metadata(job, slot, attempt, template.get("metadata") or {})
    metadata["annotations"] |= {**(notes or {}), **_made_of(job, key_id, file)}
    if fabric is not None:
        metadata["annotations"][names.NOTE_FABRIC] = fabric.profile
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _worker_metadata(
    job: JobObject, slot: int, attempt: int, written: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata of a worker's pod.

    Args:
        job: The job.
        slot: Slot of the pod.
        attempt: Attempt of the pod.
        written: Metadata of the template.

    Returns:
        Name, labels, annotations and owner of the pod; the finalizers of the template, as in a Job.
    """
    assert job.spec is not None
    assert job.spec.elasticity is not None
    may_evict = job.spec.elasticity.autoscaler is Autoscaler.MAY_EVICT
    kept = {"finalizers": written["finalizers"]} if written.get("finalizers") else {}
    return kept | {
        "name": names.worker_name(job.name, slot, attempt),
        "namespace": job.namespace,
        "labels": {
            "sidecar.istio.io/inject": "false",
            **labels(job, names.ROLE_WORKER),
            **(written.get("labels") or {}),
            names.LABEL_SLOT: str(slot),
            names.LABEL_ATTEMPT: str(attempt),
        },
        "annotations": {
            "sidecar.istio.io/inject": "false",
            "linkerd.io/inject": "disabled",
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "true" if may_evict else "false",
            **({} if may_evict else {"karpenter.sh/do-not-disrupt": "true"}),
            **(written.get("annotations") or {}),
        },
        "ownerReferences": [owner_reference(job)],
    }


def _worker_env(
    job: JobObject, slot: int, attempt: int, mounted: str, coordinators: tuple[str, ...]
) -> list[dict[str, Any]]:
    assert job.settings is not None
    host = names.coordinator_host(job.name, job.namespace)
    urls = (f"https://{host}:{names.COORDINATOR_PORT}", *coordinators)
    return [
        {"name": names.ENV_HOST, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *_common_env(job, mounted),
        _set(names.ENV_TLS_OWN_CERT, f"{FILES}/{AGENT_CERTIFICATE}"),
        _set(names.ENV_TLS_OWN_KEY, f"{FILES}/{AGENT_KEY}"),
        _set(names.ENV_SLOT, slot),
        _set(names.ENV_ATTEMPT, attempt),
        _set(names.ENV_PROCS, job.settings.procs_per_replica),
        _set(names.ENV_COORDINATOR, ",".join(urls)),
        _set(names.ENV_RUN_DIR, names.POD_RUN_DIR),
        _set(names.ENV_DRAIN_GRACE, drain_grace_s(job)),
        _set(names.ENV_METRICS_PORT, job.settings.metrics_port),
    ]


def drain_grace_s(job: JobObject) -> int:
    """Return the seconds that the ranks of a pod have to leave.

    They are drainGraceSeconds, or less if the kubelet ends the pod of this template earlier.

    Args:
        job: A job with a valid spec.

    Returns:
        The seconds, at least 1.
    """
    assert job.settings is not None
    wanted = job.settings.elasticity.drain_grace_ns // NS_PER_S
    grace_s = job.template["spec"].get("terminationGracePeriodSeconds")
    if not isinstance(grace_s, int):
        return wanted
    return max(1, min(wanted, grace_s - min(GRACE_MARGIN_S, grace_s // 4)))


def _open_metrics(container: dict[str, Any], number: int) -> None:
    """Declare the port of the agent's metrics, under a name that the container does not have."""
    declared = items_of(container, "ports")
    if any(port.get("containerPort") == number for port in declared):
        return
    taken = any(port.get("name") == METRICS_PORT for port in declared)
    name = METRICS_PORT_ELSE if taken else METRICS_PORT
    port = {"name": name, "containerPort": number, "protocol": "TCP"}
    _append(container, "ports", port)


def _common_env(job: JobObject, mounted: str) -> list[dict[str, Any]]:
    return [
        _set(names.ENV_VERSION, ENV_VERSION_NOW),
        _set(names.ENV_JOB, job.name),
        _set(names.ENV_NAMESPACE, job.namespace),
        _set(names.ENV_SPEC, f"{FILES}/{JOB_FILE}"),
        _set(names.ENV_TLS_CERT, f"{FILES}/{CERTIFICATE}"),
        _from_secret(names.ENV_TOKEN, mounted, TOKEN),
        _set(names.ENV_TOKENS_FILE, f"{TOKENS_FOLDER}/{TOKENS}"),
    ]


def _made_of(job: JobObject, key_id: str, file: str) -> dict[str, str]:
    """Return the annotations that tell what a pod was made of."""
    return {
        names.NOTE_KEY: key_id,
        names.NOTE_FILE: file,
        names.NOTE_REVISION: job.revision,
    }


def _from_secret(name: str, mounted: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": mounted, "key": key}}}


def coordinator(
    job: JobObject,
    attempt: int,
    *,
    key_id: str,
    file: str = "",
    notes: Mapping[str, str] | None = None,
    fabric: ChosenFabric | None = None,
) -> dict[str, Any]:
    """Return the manifest of a coordinator's pod.

    Args:
        job: A job with a valid spec.
        attempt: Attempt of the pod, which makes its name unique (C3).
        key_id: Id of the operator's key whose Secret the pod mounts.
        file: Digest of the job file in that Secret; empty for the present one.
        notes: Annotations to add.
        fabric: Fabric profile of the workers; None adds nothing.

    Returns:
        The manifest.
    """
    assert job.spec is not None
    file = file or file_id(job)
    mounted = names.secret_name(job.name, job.uid, key_id, file)
    template = copy.deepcopy(dict(job.template))
    if fabric is not None:
        trainer = next(c for c in template["spec"]["containers"] if c["name"] == TRAINER)
        equip(template, trainer, fabric)
    spec, is_root = coordinator_spec(job.template, job.spec.coordinator, equipped=template)
    (container,) = spec["containers"]
    container |= {
        "command": ["python3", "-m", "paceline.coordinator"],
        "env": [
            {"name": names.ENV_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            *_common_env(job, mounted),
            _from_secret(names.ENV_OPERATOR_TOKEN, mounted, OPERATOR_TOKEN),
            _set(names.ENV_TLS_KEY, f"{FILES}/{PRIVATE_KEY}"),
            _set(names.ENV_TLS_CALLERS, f"{FILES}/{CALLERS}"),
            _set(names.ENV_LINGER, LINGER_S),
        ],
        "ports": [{"name": "control", "containerPort": names.COORDINATOR_PORT, "protocol": "TCP"}],
        # The probes test its event loop. The Service publishes it even if it is not ready, since
        # agents must reach a new coordinator.
        "readinessProbe": _probe(period=2, failures=2),
        "livenessProbe": _probe(period=10, failures=6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec |= {
        "hostname": f"{job.name}-coordinator",
        "subdomain": names.COORDINATOR_SERVICE,
        "terminationGracePeriodSeconds": COORDINATOR_GRACE_S,
    }
    files = [JOB_FILE, CERTIFICATE, PRIVATE_KEY, CALLERS]
    _mount(spec, container, "paceline-job", FILES, _job_volume(mounted, files))
    _mount(spec, container, "paceline-tokens", TOKENS_FOLDER, _tokens_volume(job))
    _mount(spec, container, "tmp", "/tmp", {"emptyDir": {}})
    harden(spec, root=[COORDINATOR] if is_root else ())
    placement.spread_by_name(spec, job)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.coordinator_name(job.name, attempt),
            "namespace": job.namespace,
            "labels": {
                "sidecar.istio.io/inject": "false",
                **labels_of(job.template),
                **labels(job, names.ROLE_COORDINATOR),
                names.LABEL_ATTEMPT: str(attempt),
            },
            "annotations": {
                "sidecar.istio.io/inject": "false",
                "linkerd.io/inject": "disabled",
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "true",
                **annotations_of(job.template),
                **(notes or {}),
                **_made_of(job, key_id, file),
            },
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def secret(
    job: JobObject, keys: JobKeys, *, file: str = "", tls: Mapping[str, str]
) -> dict[str, Any]:
    """Return the manifest of the job's Secret, which is never read or changed once created (C2).

    Args:
        job: A job with a valid spec.
        keys: Secrets of the job.
        file: Digest of the job file that the pods of the Secret name; empty for the present one.
        tls: Certificates and keys as PEM, by the file names under which pods mount them.

    Returns:
        The manifest.
    """
    data = {
        JOB_FILE: job_file(job),
        TOKEN: keys.token,
        OPERATOR_TOKEN: keys.operator_token,
        **tls,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {
            "name": names.secret_name(job.name, job.uid, keys.key_id, file or file_id(job)),
            "namespace": job.namespace,
            "labels": labels(job, "job"),
            "ownerReferences": [owner_reference(job)],
        },
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in data.items()},
    }


def _probe(*, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/healthz", "port": "control", "scheme": "HTTPS"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _set(name: str, value: object) -> dict[str, Any]:
    return {"name": name, "value": str(value)}


def _job_volume(mounted: str, files: list[str]) -> dict[str, Any]:
    items = [{"key": name, "path": name} for name in files]
    return {"secret": {"secretName": mounted, "items": items, "defaultMode": 0o444}}


def _tokens_volume(job: JobObject) -> dict[str, Any]:
    """Return the volume for the Secret with replaced tokens.

    It is optional: the kubelet adds the files to running pods once an administrator creates or
    changes the Secret.

    Args:
        job: The job.

    Returns:
        The source of the volume.
    """
    name = names.tokens_secret_name(job.name, job.uid)
    return {"secret": {"secretName": name, "optional": True, "defaultMode": 0o444}}


def _mount(
    spec: dict[str, Any], container: dict[str, Any], name: str, path: str, source: dict[str, Any]
) -> None:
    """Add a volume and its mount, unless the template mounts something at this path.

    If the template has a volume of this name, the next free name with a number is taken.
    """
    mounts = items_of(container, "volumeMounts")
    if any(str(mount.get("mountPath", "")).rstrip("/") == path for mount in mounts):
        return
    taken = {volume.get("name") for volume in items_of(spec, "volumes")}
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    name = next(each for each in itertools.chain([name], numbered) if each not in taken)
    mount: dict[str, Any] = {"name": name, "mountPath": path}
    mount |= {"readOnly": True} if "secret" in source else {}
    _append(container, "volumeMounts", mount)
    _append(spec, "volumes", {"name": name, **source})


def _append(where: dict[str, Any], field: str, item: dict[str, Any]) -> None:
    """Append to a list of a manifest; what is no list stays, for the API server to refuse."""
    items = where.setdefault(field, [])
    if isinstance(items, list):
        where[field] = [*items, item]
