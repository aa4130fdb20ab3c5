"""Additions of a fabric profile to workers' pods; the template takes precedence (C13)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChosenFabric:
    """A chosen fabric profile, as `status.fabric` keeps it."""

    profile: str
    carries: str
    pod: Mapping[str, Any]
    """Additions to the pod: a `FabricPod` as in YAML, with all amounts as numbers."""
    message: str = ""
    """Reason why the profile offers less than the nodes, and the remedy; else empty."""

    def status(self) -> dict[str, Any]:
        """Return the value of `status.fabric`."""
        kept = {"profile": self.profile, "carries": self.carries, "pod": dict(self.pod)}
        return kept | ({"message": self.message} if self.message else {})


def equip(template: dict[str, Any], container: dict[str, Any], fabric: ChosenFabric) -> None:
    """Add a fabric profile to a worker's template, in place.

    Args:
        template: The pod template.
        container: Its trainer container.
        fabric: The profile.
    """
    added: Mapping[str, Any] = copy.deepcopy(dict(fabric.pod))
    spec = template["spec"]
    metadata = template.setdefault("metadata", {})
    metadata["annotations"] = {
        **added.get("annotations", {}),
        **(metadata.get("annotations") or {}),
    }
    for field in ("hostNetwork", "dnsPolicy"):
        if field in added and spec.get(field) is None:
            spec[field] = added[field]
    if added.get("nodeSelector"):
        spec["nodeSelector"] = {**added["nodeSelector"], **(spec.get("nodeSelector") or {})}
    spec.setdefault("tolerations", []).extend(added.get("tolerations", ()))
    if not spec["tolerations"]:
        del spec["tolerations"]
    _append(spec, "volumes", added.get("volumes", ()), "name")
    named = {part["name"] for part in spec["containers"]}
    sidecars = [part for part in added.get("initContainers", ()) if part["name"] not in named]
    _append(spec, "initContainers", sidecars, "name")
    _append(spec, "resourceClaims", added.get("resourceClaims", ()), "name")
    _append(container, "volumeMounts", added.get("volumeMounts", ()), "mountPath")
    _append(container, "env", added.get("env", ()), "name")
    _ask(container, added)
    _permit(spec, container, added)


def _append(into: dict[str, Any], field: str, items: Iterable[Mapping[str, Any]], key: str) -> None:
    """Append the items whose `key` no present item has."""
    held = {item.get(key) for item in into.get(field) or ()}
    more = [item for item in items if item.get(key) not in held]
    if more:
        into[field] = [*(into.get(field) or ()), *more]


def _ask(container: dict[str, Any], added: Mapping[str, Any]) -> None:
    amounts = added.get("resources") or {}
    claims = [{"name": claim["name"]} for claim in added.get("resourceClaims", ())]
    if not amounts and not claims:
        return
    resources = container.setdefault("resources", {})
    for name, amount in amounts.items():
        if not any(name in (resources.get(part) or {}) for part in ("requests", "limits")):
            # Kubernetes sets the request of a device to its limit.
            resources.setdefault("limits", {})[name] = str(amount)
    _append(resources, "claims", claims, "name")


def _permit(spec: dict[str, Any], container: dict[str, Any], added: Mapping[str, Any]) -> None:
    context = container.setdefault("securityContext", {})
    user = added.get("runAsUser")
    pod = spec.get("securityContext") or {}
    chosen = any(key in part for part in (context, pod) for key in ("runAsUser", "runAsNonRoot"))
    if user is not None and not chosen:
        context |= {"runAsUser": user, "runAsNonRoot": user != 0}
    if added.get("privileged") and context.get("privileged") is None:
        context["privileged"] = True
    capabilities = added.get("capabilities") or []
    if capabilities and not context.get("privileged"):
        held = context.setdefault("capabilities", {"drop": ["ALL"]})
        held["add"] = list(dict.fromkeys([*(held.get("add") or ()), *capabilities]))
    if not context:
        del container["securityContext"]
