"""What the pods of a job need in the cluster, by the field that asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct
from paceline_api.defaults import QUEUE_LABEL

NAMESPACED: Final = "/api/v1/namespaces/{namespace}/"
QUEUES: Final = "/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues"


class Needed(Struct, frozen=True):
    """One object without which the job's pods do not start."""

    kind: str
    """Kind of the object, for messages."""
    path: str
    """Path of its collection on the API server, with {namespace} if it has one."""
    name: str
    field: str
    """Field of the job that names it."""


def needed(job: Mapping[str, Any]) -> Iterator[Needed]:
    """Yield the objects that a job names.

    Objects that the job marks as optional are left out.

    Args:
        job: The job as in YAML, merged with its runtime.

    Yields:
        Each object, once for each field that names it.
    """
    spec = job.get("spec") or {}
    labels = job["metadata"].get("labels") or {}
    if queue := labels.get(QUEUE_LABEL):
        yield Needed("LocalQueue", QUEUES, queue, f"metadata.labels[{QUEUE_LABEL}]")
    if claim := (spec.get("checkpoint") or {}).get("claimName"):
        yield _claim(claim, "spec.checkpoint.claimName")
    pod = (spec.get("template") or {}).get("spec") or {}
    above = "spec.template.spec"
    if account := pod.get("serviceAccountName"):
        path = NAMESPACED + "serviceaccounts"
        yield Needed("ServiceAccount", path, account, f"{above}.serviceAccountName")
    if priority := pod.get("priorityClassName"):
        path = "/apis/scheduling.k8s.io/v1/priorityclasses"
        yield Needed("PriorityClass", path, priority, f"{above}.priorityClassName")
    if runtime_class := pod.get("runtimeClassName"):
        path = "/apis/node.k8s.io/v1/runtimeclasses"
        yield Needed("RuntimeClass", path, runtime_class, f"{above}.runtimeClassName")
    for index, secret in enumerate(pod.get("imagePullSecrets") or ()):
        yield from _named("Secret", secret, f"{above}.imagePullSecrets[{index}].name")
    for index, volume in enumerate(pod.get("volumes") or ()):
        yield from _of_volume(volume, f"{above}.volumes[{index}]")
    for part in ("initContainers", "containers"):
        for index, container in enumerate(pod.get(part) or ()):
            yield from _of_container(container, f"{above}.{part}[{index}]")


def _of_volume(volume: Mapping[str, Any], field: str) -> Iterator[Needed]:
    if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
        yield _claim(claim, f"{field}.persistentVolumeClaim.claimName")
    yield from _named("Secret", volume.get("secret"), f"{field}.secret", key="secretName")
    yield from _named("ConfigMap", volume.get("configMap"), f"{field}.configMap")
    for index, source in enumerate((volume.get("projected") or {}).get("sources") or ()):
        inner = f"{field}.projected.sources[{index}]"
        yield from _named("Secret", source.get("secret"), f"{inner}.secret")
        yield from _named("ConfigMap", source.get("configMap"), f"{inner}.configMap")


def _of_container(container: Mapping[str, Any], field: str) -> Iterator[Needed]:
    for index, source in enumerate(container.get("envFrom") or ()):
        inner = f"{field}.envFrom[{index}]"
        yield from _named("Secret", source.get("secretRef"), f"{inner}.secretRef")
        yield from _named("ConfigMap", source.get("configMapRef"), f"{inner}.configMapRef")
    for index, variable in enumerate(container.get("env") or ()):
        source = variable.get("valueFrom") or {}
        inner = f"{field}.env[{index}].valueFrom"
        yield from _named("Secret", source.get("secretKeyRef"), f"{inner}.secretKeyRef")
        yield from _named("ConfigMap", source.get("configMapKeyRef"), f"{inner}.configMapKeyRef")


def _named(
    kind: str, source: Mapping[str, Any] | None, field: str, *, key: str = "name"
) -> Iterator[Needed]:
    name = (source or {}).get(key)
    if source and name and not source.get("optional"):
        shown = field if field.endswith(f".{key}") else f"{field}.{key}"
        yield Needed(kind, f"{NAMESPACED}{kind.lower()}s", str(name), shown)


def _claim(name: str, field: str) -> Needed:
    return Needed("PersistentVolumeClaim", NAMESPACED + "persistentvolumeclaims", str(name), field)
