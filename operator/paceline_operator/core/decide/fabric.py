"""Choice of the fabric profile for the workers of a job (C13).

The profile is chosen once, before the first pod, and kept in `status.fabric` with its content, so
that a later change of the profile does not split a running job. A job that names its profile gets
that one. For `auto`, the nodes on which the workers could run decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline_api.names import NOTE_FABRIC
from paceline_api.types.enums import FabricRequirement
from paceline_api.types.fabric import ALL, PLAIN, FabricPod, FabricSpec

from paceline_operator.core.devices import amount_of, is_device
from paceline_operator.core.job import Job
from paceline_operator.core.observed import Node, Observed
from paceline_operator.core.pods.fabric import Fabric
from paceline_operator.core.pods.frozen import trainer_of
from paceline_operator.core.refusals import POD_SECURITY, RefusalKind

AUTO: Final = "auto"
"""Value of `spec.fabric.profile` that lets the operator choose."""
RANK: Final = (FabricRequirement.ANY, FabricRequirement.RDMA, FabricRequirement.GPU_DIRECT)
"""Requirements in ascending order: a profile that carries one also satisfies those before it."""
SEARCH_S: Final = 30.0
"""Seconds between two searches for a network, in addition to those after changes of nodes or
profiles."""


@dataclass(frozen=True, slots=True)
class NoFabric:
    """Result if no profile fits, so no pod can be made yet."""

    why: str
    """Reason and remedy, worded for the user."""


def fabric_of(job: Job, seen: Observed) -> Fabric | NoFabric:
    """Return the fabric profile for a job's workers.

    Args:
        job: The job.
        seen: Everything observed besides the job.

    Returns:
        The profile that the status stores or that is chosen now, or the reason why none fits.
    """
    kept = job.status.get("fabric")
    if kept:
        message = kept.get("message", "")
        return Fabric(kept["profile"], kept.get("carries", ""), kept.get("pod") or {}, message)
    wanted, required = job.resolved["fabric"]["profile"], job.resolved["fabric"]["required"]
    nodes = _candidates(job, seen.nodes.values())
    if wanted == AUTO:
        # Pods made before a crash name a profile that the status does not have yet.
        noted = (pod.notes.get(NOTE_FABRIC, "") for pod in seen.own(job.uid))
        begun = PLAIN if job.start_s is not None else AUTO
        wanted = next((name for name in noted if name in seen.fabrics), begun)
    if wanted == AUTO:
        wanted = _found(job, seen.fabrics, nodes, required) or ""
        if required == FabricRequirement.ANY and wanted != PLAIN:
            free = {n: spec for n, spec in seen.fabrics.items() if not _privileged(spec)}
            best, wanted = wanted, _found(job, free, nodes, required) or PLAIN
            less = _unasked(best, seen) if wanted == PLAIN else _refused(wanted, seen)
            if less:
                return Fabric(PLAIN, str(FabricRequirement.ANY), {}, less)
    if not wanted:
        return NoFabric(
            f"spec.fabric.required: {required}, and no profile that carries it fits the nodes of "
            f"this job ({len(nodes)} seen); looked for: {_offers(seen, required)}. Install the "
            "device plugin of the network, make a FabricProfile for it, or name one in "
            "spec.fabric.profile"
        )
    profile = seen.fabrics.get(wanted)
    if profile is None:
        known = ", ".join(sorted(seen.fabrics))
        return NoFabric(
            f"spec.fabric.profile: {wanted} is not known; use one of {known}, or make a "
            "FabricProfile of that name"
        )
    if not _carries(profile, required):
        return NoFabric(
            f"spec.fabric.profile: {wanted} carries {profile.carries}, and spec.fabric.required "
            f"is {required}; make the job anew with another profile, such as auto"
        )
    return _filled(wanted, profile, nodes)


def _found(
    job: Job,
    profiles: Mapping[str, FabricSpec],
    nodes: list[Node],
    required: FabricRequirement,
) -> str | None:
    """Return the name of the profile that `auto` chooses; None if none carries what is required.

    If nothing is required, a profile is taken only if all nodes fit and hold as many workers as
    without it. It must not keep a job from nodes on which it could run.

    Args:
        job: The job.
        profiles: All profiles by name.
        nodes: Nodes on which a worker could run.
        required: What the network must be able to do.

    Returns:
        The name of the profile with the highest priority; that of the plain one if nothing is
        required and no other fits.
    """
    asks = required != FabricRequirement.ANY
    devices = _devices_of(job)
    if not asks and not devices:
        return PLAIN

    def fits(profile: FabricSpec) -> bool:
        if asks:
            return any(_fits(profile, node) for node in nodes)
        return all(_fits(profile, node) and _holds(profile, node, devices) for node in nodes)

    fitting = [
        (-(profile.priority or 0), name)
        for name, profile in profiles.items()
        if nodes and _says_where(profile) and _carries(profile, required) and fits(profile)
    ]
    if fitting:
        return min(fitting)[1]
    return None if asks else PLAIN


def _forbidden(seen: Observed, profile: FabricSpec) -> bool:
    """Return True if the last refusal is due to what the profile adds unasked."""
    refusal = seen.refusal
    if refusal is None:
        return False
    if refusal.kind is RefusalKind.QUOTA:
        names = (profile.pod.resources if profile.pod else None) or ()
        return any(name in refusal.message for name in names)
    return refusal.kind is RefusalKind.FORBIDDEN or POD_SECURITY in refusal.message


def is_instead(job: Job, seen: Observed, fabric: Fabric | NoFabric) -> bool:
    """Return True if this fabric replaces one that the API server has refused.

    A second refusal in a row is attributed to the template.

    Args:
        job: The job.
        seen: Everything observed besides the job.
        fabric: The result of `fabric_of`.

    Returns:
        True if the refusal no longer applies to what would be created now.
    """
    refusal = seen.refusal
    if refusal is None or refusal.count > 1 or job.status.get("fabric"):
        return False
    return isinstance(fabric, Fabric) and refusal.message in fabric.message


def _unasked(name: str, seen: Observed) -> str:
    return (
        f"the nodes offer profile {name}, which gives pods privileges; nobody has asked for it, so "
        f"they use {PLAIN}. Write spec.fabric.required: {seen.fabrics[name].carries}, or "
        f"spec.fabric.profile: {name}, and make the job anew"
    )


def _privileged(profile: FabricSpec) -> bool:
    """Return True if a profile needs root, or more than baseline pod security allows.

    Such a profile is only for jobs that ask for it.
    """
    pod = profile.pod or FabricPod()
    parts = pod.model_dump(mode="json", by_alias=True, exclude_none=True)
    inside = (part.get("securityContext") or {} for part in parts.get("initContainers", ()))
    return bool(
        pod.capabilities
        or pod.run_as_user == 0
        or any("hostPath" in volume for volume in parts.get("volumes", ()))
        or any(
            c.get("privileged")
            or (c.get("capabilities") or {}).get("add")
            or c.get("runAsUser") == 0
            for c in inside
        )
    )


def _refused(name: str, seen: Observed) -> str:
    if seen.refusal is None or not _forbidden(seen, seen.fabrics[name]):
        return ""
    return (
        f"the nodes offer profile {name}, and the namespace forbids it: "
        f"{seen.refusal.message}; the pods use {PLAIN}. Allow it (pod security: the label "
        "pod-security.kubernetes.io/enforce: privileged on the namespace), and make the job anew"
    )


def _candidates(job: Job, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes on which a worker could run, judged by labels and devices."""
    selector: Mapping[str, str] = job.template["spec"].get("nodeSelector") or {}
    devices = _devices_of(job)
    return [
        node
        for node in nodes
        if node.ready
        and not node.cordoned
        and all(node.labels.get(key) == value for key, value in selector.items())
        and all(node.offers.get(name) for name in devices)
    ]


def _devices_of(job: Job) -> dict[str, int]:
    """Return the device resources that the trainer requests, such as nvidia.com/gpu, by name."""
    resources = trainer_of(job.template).get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    amounts = {name: amount_of(str(amount)) for name, amount in asked.items() if is_device(name)}
    return {name: amount for name, amount in amounts.items() if amount}


def _says_where(profile: FabricSpec) -> bool:
    """Return True if a profile can be matched with nodes, by labels or by device resources."""
    labels = profile.match.node_labels if profile.match else None
    return bool(labels or (profile.pod and profile.pod.resources))


def _fits(profile: FabricSpec, node: Node) -> bool:
    """Return True if a node has the labels and at least the resources that a profile needs."""
    labels = {
        **((profile.pod.node_selector if profile.pod else None) or {}),
        **((profile.match.node_labels if profile.match else None) or {}),
    }
    resources = (profile.pod.resources if profile.pod else None) or {}
    return all(node.labels.get(k) == v for k, v in labels.items()) and all(
        node.offers.get(name, 0) >= (1 if amount == ALL else int(amount))
        for name, amount in resources.items()
    )


def _holds(profile: FabricSpec, node: Node, devices: Mapping[str, int]) -> bool:
    """Return True if the profile does not reduce the number of workers that a node holds."""
    without = min((node.offers.get(name, 0) // asked for name, asked in devices.items()), default=1)
    resources = (profile.pod.resources if profile.pod else None) or {}
    return all(
        without <= (1 if amount == ALL else node.offers.get(name, 0) // int(amount))
        for name, amount in resources.items()
        if name not in devices
    )


def _carries(profile: FabricSpec, required: FabricRequirement | str) -> bool:
    return RANK.index(profile.carries) >= RANK.index(FabricRequirement(required))


def _offers(seen: Observed, required: FabricRequirement) -> str:
    """Describe the profiles for which `auto` has searched the nodes, for a message."""
    found = [
        f"{name} ({', '.join((profile.pod.resources if profile.pod else None) or ['labels'])})"
        for name, profile in sorted(seen.fabrics.items())
        if _says_where(profile) and _carries(profile, required)
    ]
    return "; ".join(found) or "nothing, since no profile carries it"


def _filled(name: str, profile: FabricSpec, nodes: list[Node]) -> Fabric | NoFabric:
    """Return a profile with numbers in place of `All`: the least that any fitting node offers."""
    pod: dict[str, Any] = {}
    if profile.pod is not None:
        pod = profile.pod.model_dump(mode="json", by_alias=True, exclude_none=True)
    amounts: dict[str, int | str] = dict(pod.get("resources") or {})
    fitting = [node for node in nodes if _fits(profile, node)]
    for resource, amount in amounts.items():
        if amount != ALL:
            continue
        if not fitting:
            return NoFabric(
                f"profile {name} gives each pod all of {resource} that its node offers, and no "
                "node is seen that offers it; wait for the device plugin, or make a "
                "FabricProfile with a number"
            )
        amounts[resource] = min(node.offers[resource] for node in fitting)
    if amounts:
        pod["resources"] = amounts
    return Fabric(name, str(profile.carries), pod)
