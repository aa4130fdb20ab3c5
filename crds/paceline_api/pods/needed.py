"""What the pods of a job need in the cluster, by the field that asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from paceline_api.defaults import QUEUE_LABEL
from paceline_api.pods.manifest import indexed, map_of

NAMESPACED: Final = "/api/v1/namespaces/{namespace}/"
QUEUES: Final = "/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues"
SECRET: Final = "Secret"
CLAIM: Final = "PersistentVolumeClaim"
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Names that objects can have. Others are for the API server to refuse, and are in no path."""


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

    Objects that the job marks as optional are left out, and so is what has the wrong type.

    Args:
        job: The job as in YAML, merged with its runtime.

    Yields:
        Each object, once for each field that names it.
    """
    yield from (each for each in _every(job) if NAME.fullmatch(each.name))


def _every(job: Mapping[str, Any]) -> Iterator[Needed]:
    spec = map_of(job, "spec")
    labels = map_of(job["metadata"], "labels")
    if queue := labels.get(QUEUE_LABEL):
        yield Needed("LocalQueue", QUEUES, str(queue), f"metadata.labels[{QUEUE_LABEL}]")
    if claim := map_of(spec, "checkpoint").get("claimName"):
        yield _claim(claim, "spec.checkpoint.claimName")
    pod = map_of(map_of(spec, "template"), "spec")
    above = "spec.template.spec"
    for kind, path, field in (
        ("ServiceAccount", NAMESPACED + "serviceaccounts", "serviceAccountName"),
        ("PriorityClass", "/apis/scheduling.k8s.io/v1/priorityclasses", "priorityClassName"),
        ("RuntimeClass", "/apis/node.k8s.io/v1/runtimeclasses", "runtimeClassName"),
    ):
        if name := pod.get(field):
            yield Needed(kind, path, str(name), f"{above}.{field}")
    for index, secret in indexed(pod, "imagePullSecrets"):
        yield from _named(SECRET, secret, f"{above}.imagePullSecrets[{index}].name")
    for index, volume in indexed(pod, "volumes"):
        yield from _of_volume(volume, f"{above}.volumes[{index}]")
    for part in ("initContainers", "containers"):
        for index, container in indexed(pod, part):
            yield from _of_container(container, f"{above}.{part}[{index}]")


def _of_volume(volume: Mapping[str, Any], field: str) -> Iterator[Needed]:
    if claim := map_of(volume, "persistentVolumeClaim").get("claimName"):
        yield _claim(claim, f"{field}.persistentVolumeClaim.claimName")
    yield from _named(SECRET, map_of(volume, "secret"), f"{field}.secret", key="secretName")
    yield from _named("ConfigMap", map_of(volume, "configMap"), f"{field}.configMap")
    for index, source in indexed(map_of(volume, "projected"), "sources"):
        inner = f"{field}.projected.sources[{index}]"
        yield from _named(SECRET, map_of(source, "secret"), f"{inner}.secret")
        yield from _named("ConfigMap", map_of(source, "configMap"), f"{inner}.configMap")


def _of_container(container: Mapping[str, Any], field: str) -> Iterator[Needed]:
    for index, source in indexed(container, "envFrom"):
        inner = f"{field}.envFrom[{index}]"
        yield from _named(SECRET, map_of(source, "secretRef"), f"{inner}.secretRef")
        yield from _named("ConfigMap", map_of(source, "configMapRef"), f"{inner}.configMapRef")
    for index, variable in indexed(container, "env"):
        source = map_of(variable, "valueFrom")
        inner = f"{field}.env[{index}].valueFrom"
        yield from _named(SECRET, map_of(source, "secretKeyRef"), f"{inner}.secretKeyRef")
        yield from _named(
            "ConfigMap", map_of(source, "configMapKeyRef"), f"{inner}.configMapKeyRef"
        )


def _named(
    kind: str, source: Mapping[str, Any], field: str, *, key: str = "name"
) -> Iterator[Needed]:
    name = source.get(key)
    if name and not source.get("optional"):
        shown = field if field.endswith(f".{key}") else f"{field}.{key}"
        yield Needed(kind, f"{NAMESPACED}{kind.lower()}s", str(name), shown)


def _claim(name: object, field: str) -> Needed:
    return Needed(CLAIM, NAMESPACED + "persistentvolumeclaims", str(name), field)
