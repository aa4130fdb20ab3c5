"""What the pods of a job take of a namespace's quotas, and where there is not so much left.

The API server itself compares one pod at a time, so a dry run of one pod does not show that eight
of them exceed a quota.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from msgspec import Struct

from paceline_api.pods.devices import is_device
from paceline_api.pods.manifest import items_of, map_of

QUANTITY: Final = re.compile(
    r"([+-]?[0-9]{1,30}(?:\.[0-9]{0,30})?)([a-zA-Z]{0,2}|[eE][+-]?[0-9]{1,2})"
)
SUFFIXES: Final[Mapping[str, Decimal]] = {
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
    **{unit: Decimal(1000) ** -power for power, unit in enumerate("mun", 1)},
}
PODS: Final = ("pods", "count/pods")
WITHOUT_PREFIX: Final = ("cpu", "memory", "ephemeral-storage")
"""Resources whose requests a quota may also name without `requests.`; hugepages are others."""


class Shortage(Struct, frozen=True):
    """A resource of which a quota has less left than the pods of a job take."""

    quota: str
    """Name of the ResourceQuota."""
    resource: str
    """Resource as the quota names it, such as `limits.cpu`."""
    asked: Decimal
    """Amount that all pods together take."""
    used: Decimal
    hard: Decimal


def amount(quantity: object) -> Decimal | None:
    """Return a quantity as Kubernetes writes it, such as 500m or 2Gi; None for anything else."""
    match = QUANTITY.fullmatch(str(quantity))
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        return Decimal(number) * Decimal(10) ** int(suffix[1:])
    factor = SUFFIXES.get(suffix)
    return None if factor is None else Decimal(number) * factor


def usage(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what a pod takes of quotas, by the names that quotas may use.

    Args:
        pod: The pod; as the API server answers it, it also has the namespace's defaults.

    Returns:
        Amounts of each resource.
    """
    spec = map_of(pod, "spec")
    amounts = dict.fromkeys(PODS, Decimal(1))
    overhead = _amounts(map_of(spec, "overhead"))
    for part in ("requests", "limits"):
        total = _of_containers(spec, part) | _of_container(spec, part)
        for name, value in overhead.items():
            # The overhead is added to a limit only where there is one.
            if part == "requests" or name in total:
                total[name] = total.get(name, Decimal(0)) + value
        for name, value in total.items():
            amounts[f"{part}.{name}"] = value
            if part == "requests" and (name in WITHOUT_PREFIX or name.startswith("hugepages-")):
                amounts[name] = value
    return amounts


def shortages(
    quotas: Iterable[Mapping[str, Any]], pods: Iterable[tuple[Mapping[str, Any], int]]
) -> list[Shortage]:
    """Return where quotas have less left than pods take.

    A quota counts only the pods that match its scopes.

    Args:
        quotas: The ResourceQuotas of the namespace.
        pods: Pods, each with the number of its copies.

    Returns:
        One entry for each quota and resource.
    """
    asked = [(pod, usage(pod), count) for pod, count in pods]
    exceeded = []
    for quota in quotas:
        matching = [(uses, count) for pod, uses, count in asked if _matches(quota, pod)]
        used = _amounts(map_of(map_of(quota, "status"), "used"))
        for name, hard in _amounts(map_of(map_of(quota, "status"), "hard")).items():
            total = sum((uses.get(name, Decimal(0)) * n for uses, n in matching), Decimal(0))
            before = used.get(name, Decimal(0))
            if total and before + total > hard:
                title = str(map_of(quota, "metadata").get("name", ""))
                exceeded.append(Shortage(title, name, total, before, hard))
    return exceeded


def text_of(value: Decimal, resource: str) -> str:
    """Return an amount for people: memory and storage with a binary suffix, CPU to a thousandth."""
    if resource.endswith(("memory", "storage")) or "hugepages-" in resource:
        for power, unit in reversed(list(enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1))):
            scaled = value / Decimal(1024) ** power
            if scaled >= 1:
                return f"{_plain(scaled)}{unit}"
    return _plain(value)


def _plain(value: Decimal) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _amounts(where: Mapping[str, Any]) -> dict[str, Decimal]:
    parsed = {str(name): amount(value) for name, value in where.items()}
    return {name: value for name, value in parsed.items() if value is not None}


def _of_container(container: Mapping[str, Any], part: str) -> dict[str, Decimal]:
    """Return what `resources` of a container takes, or those of a pod, which count before them."""
    resources = map_of(container, "resources")
    limits = _amounts(map_of(resources, "limits"))
    # A limit without a request is the request as well. Of devices only requests count.
    if part == "limits":
        return {name: value for name, value in limits.items() if not is_device(name)}
    return limits | _amounts(map_of(resources, "requests"))


def _of_containers(spec: Mapping[str, Any], part: str) -> dict[str, Decimal]:
    """Return what a pod takes at most at any time.

    Containers and sidecars run together. An init container runs beside the sidecars before it.

    Args:
        spec: Spec of the pod.
        part: `requests` or `limits`.

    Returns:
        Amounts of each resource.
    """
    beside: dict[str, Decimal] = {}
    highest: dict[str, Decimal] = {}
    for container in items_of(spec, "initContainers"):
        own = _of_container(container, part)
        together = _sum(beside, own)
        highest = _highest(highest, together)
        if container.get("restartPolicy") == "Always":
            beside = together
    for container in items_of(spec, "containers"):
        beside = _sum(beside, _of_container(container, part))
    return _highest(highest, beside)


def _sum(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {n: one.get(n, Decimal(0)) + other.get(n, Decimal(0)) for n in {**one, **other}}


def _highest(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {n: max(one.get(n, Decimal(0)), other.get(n, Decimal(0))) for n in {**one, **other}}


def _matches(quota: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Return True if a pod counts for a quota; a scope that is not known matches no pod."""
    spec = map_of(quota, "spec")
    scopes = spec.get("scopes")
    for scope in scopes if isinstance(scopes, list) else ():
        if not _in_scope(str(scope), pod):
            return False
    expressions = items_of(map_of(spec, "scopeSelector"), "matchExpressions")
    return all(_expressed(expression, pod) for expression in expressions)


def _expressed(expression: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    scope, operator = str(expression.get("scopeName")), expression.get("operator")
    values = list(expression.get("values") or ())
    name = map_of(pod, "spec").get("priorityClassName") or ""
    if scope == "PriorityClass" and operator == "In":
        return name in values
    if scope == "PriorityClass" and operator == "NotIn":
        return name not in values
    if operator == "DoesNotExist":
        return scope in _KNOWN and not _in_scope(scope, pod)
    return operator == "Exists" and _in_scope(scope, pod)


_KNOWN: Final = (
    *("Terminating", "NotTerminating", "BestEffort", "NotBestEffort", "PriorityClass"),
    "CrossNamespacePodAffinity",
)


def _in_scope(scope: str, pod: Mapping[str, Any]) -> bool:
    spec = map_of(pod, "spec")
    match scope:
        case "Terminating":
            return spec.get("activeDeadlineSeconds") is not None
        case "NotTerminating":
            return spec.get("activeDeadlineSeconds") is None
        case "BestEffort":
            return _is_best_effort(spec)
        case "NotBestEffort":
            return not _is_best_effort(spec)
        case "PriorityClass":
            return bool(spec.get("priorityClassName"))
        case "CrossNamespacePodAffinity":
            return any(_across_namespaces(map_of(spec, "affinity")))
    return False


def _is_best_effort(spec: Mapping[str, Any]) -> bool:
    containers = [spec, *items_of(spec, "initContainers"), *items_of(spec, "containers")]
    asked = (_of_container(each, "requests") for each in containers)
    return not any(uses.get("cpu") or uses.get("memory") for uses in asked)


def _across_namespaces(affinity: Mapping[str, Any]) -> Iterator[bool]:
    for kind in ("podAffinity", "podAntiAffinity"):
        rules = map_of(affinity, kind)
        terms = items_of(rules, "requiredDuringSchedulingIgnoredDuringExecution")
        weighted = items_of(rules, "preferredDuringSchedulingIgnoredDuringExecution")
        for term in (*terms, *(map_of(each, "podAffinityTerm") for each in weighted)):
            yield bool(term.get("namespaces")) or "namespaceSelector" in term
