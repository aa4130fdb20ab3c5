"""Labels, annotations and tolerations that the coordinator's pod has from the workers' template.

Policies of a cluster may require some of them of every pod, so the coordinator has what the workers
have. It lacks what would have an effect of its own on it: it is no member of a gang, in no queue,
needs neither further networks nor injected containers, has no metrics of a rank, and must not keep
workers away by their own anti-affinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from paceline_api.pods.devices import is_device
from paceline_api.pods.manifest import items_of, map_of

OWN_EFFECT: Final[Mapping[str, tuple[str, ...]]] = {
    "it would be in a queue or a member of a gang": (
        *(
            "kueue.x-k8s.io/",
            "scheduling.x-k8s.io/",
            "scheduling.k8s.io/",
            "scheduling.volcano.sh/",
        ),
        *("volcano.sh/", "pod-group.scheduling.sigs.k8s.io", "gang.scheduling.koordinator.sh/"),
        *("pod-group-name", "kai.scheduler/", "runai/", "yunikorn.apache.org/task-group"),
    ),
    "it would take a device of a network": (
        *("k8s.v1.cni.cncf.io/", "networking.gke.io/", "devices.gke.io/"),
        *("v1.multus-cni.io/", "k8s.ovn.org/"),
    ),
    "it names a container that the coordinator's pod lacks": (
        *("container.apparmor.security.beta.kubernetes.io/", "kubectl.kubernetes.io/"),
        "container.seccomp.security.alpha.kubernetes.io/",
    ),
    "it would be scraped for metrics that it does not have": ("prometheus.io/",),
    "it would keep a node from being removed": (
        *("cluster-autoscaler.kubernetes.io/", "karpenter.sh/"),
    ),
    "it would get credentials or mounts that it does not use": (
        *("azure.workload.identity/", "iam.amazonaws.com/", "gke-gcsfuse/", "vault.hashicorp.com/"),
    ),
}
"""Beginnings of labels and annotations that the coordinator does not inherit, by the reason."""
KEPT: Final = ("kai.scheduler/queue",)
"""Labels that a pod needs where its `schedulerName` is inherited."""
INJECTED: Final = "inject"
"""Part of the names by which webhooks add containers to a pod."""


def labels_of(template: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a workers' template that its coordinator inherits."""
    selected = set(_selected_keys(template["spec"]))
    written = _written(template, "labels")
    return {key: text for key, text in written.items() if key not in selected and _is_harmless(key)}


def annotations_of(template: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of a workers' template that its coordinator inherits."""
    written = _written(template, "annotations")
    return {key: text for key, text in written.items() if _is_harmless(key)}


def tolerations_of(template: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the taints that a coordinator tolerates, so that it may run wherever the workers may.

    An admission plugin of many clusters lets a pod that asks for a device tolerate the taint with
    the name of the device. The coordinator asks for none, so it is given these tolerations here.

    Args:
        template: Pod template of the workers.
        trainer: Its container with the ranks.

    Returns:
        The tolerations; empty if there are none.
    """
    tolerations = list(items_of(template["spec"], "tolerations"))
    resources = trainer.get("resources")
    for part in ("requests", "limits"):
        asked = resources.get(part) if isinstance(resources, Mapping) else None
        for name in asked if isinstance(asked, Mapping) else ():
            added = {"key": name, "operator": "Exists", "effect": "NoSchedule"}
            if is_device(str(name)) and added not in tolerations:
                tolerations.append(added)
    return tolerations


def _written(template: Mapping[str, Any], part: str) -> Mapping[str, str]:
    return map_of(map_of(template, "metadata"), part)


def _is_harmless(key: str) -> bool:
    if key in KEPT:
        return True
    parts = (part for parts in OWN_EFFECT.values() for part in parts)
    return INJECTED not in key and not key.startswith(tuple(parts))


def _selected_keys(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the labels by which a template selects its own workers.

    With such a label the coordinator would count as one of them, and a required anti-affinity
    between workers would take a node from them.

    Args:
        spec: Spec of the template.

    Yields:
        Keys of labels.
    """
    terms = items_of(spec, "topologySpreadConstraints")
    affinity = spec.get("affinity")
    for kind in ("podAffinity", "podAntiAffinity"):
        rules = affinity.get(kind) if isinstance(affinity, Mapping) else None
        if isinstance(rules, Mapping):
            terms += items_of(rules, "requiredDuringSchedulingIgnoredDuringExecution")
            weighted = items_of(rules, "preferredDuringSchedulingIgnoredDuringExecution")
            terms += [term["podAffinityTerm"] for term in weighted if "podAffinityTerm" in term]
    for term in terms:
        selector = term.get("labelSelector") if isinstance(term, Mapping) else None
        if isinstance(selector, Mapping):
            yield from selector.get("matchLabels") or ()
            for expression in items_of(selector, "matchExpressions"):
                if expression.get("operator") in ("In", "Exists"):
                    yield str(expression.get("key"))
