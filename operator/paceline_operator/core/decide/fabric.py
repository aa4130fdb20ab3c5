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
from paceline_api.pods.advice import POD_SECURITY
from paceline_api.pods.devices import amount_of, is_device
from paceline_api.types.enums import FabricRequirement, NodeOperator
from paceline_api.types.fabric import (
    ALL,
    AUTO,
    OWN,
    OWN_SPEC,
    PLAIN,
    FabricPod,
    FabricSpec,
    NodeExpression,
)

from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Node, Observed
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.core.pods.frozen import trainer_of
from paceline_operator.core.refusals import RefusalKind, Subject

RANK: Final = (FabricRequirement.ANY, FabricRequirement.RDMA, FabricRequirement.GPU_DIRECT)
"""Requirements in ascending order: a profile that carries one also satisfies those before it."""
NETWORKS: Final = ("k8s.v1.cni.cncf.io/networks", "networking.gke.io/interfaces")
"""Annotations that attach a pod to further networks, by Multus and on GKE."""
RDMA_RESOURCES: Final = "rdma/"
"""Prefix that the shared RDMA device plugin gives to its resources."""
GPUS: Final = "/gpu"
"""End of the names of GPU resources, which are not a network even if a profile asks for them."""
VERBS: Final = "/dev/infiniband"
"""Folder of a node's RDMA devices."""
SEARCH_S: Final = 30.0
"""Seconds between two searches for a network, in addition to those after changes of nodes or
profiles."""


@dataclass(frozen=True, slots=True)
class NoFabric:
    """Result if no profile fits, so no pod can be made yet."""

    why: str
    """Reason and remedy, worded for the user."""


def fabric_of(job: JobObject, observed: Observed) -> ChosenFabric | NoFabric:
    """Return the fabric profile for a job's workers.

    Args:
        job: The job.
        observed: Everything observed besides the job.

    Returns:
        The profile that the status stores or that is chosen now, or the reason why none fits.
    """
    kept = job.status.get("fabric")
    if kept:
        message = kept.get("message", "")
        return ChosenFabric(
            kept["profile"], kept.get("carries", ""), kept.get("pod") or {}, message
        )
    wanted, required = job.resolved["fabric"]["profile"], job.resolved["fabric"]["required"]
    nodes = _candidates(job, observed.nodes.values())
    if wanted == AUTO:
        # Pods made before a crash name a profile that the status does not have yet.
        noted = (pod.notes.get(NOTE_FABRIC, "") for pod in observed.own(job.uid))
        begun = PLAIN if job.start_s is not None else AUTO
        wanted = next((name for name in noted if name in observed.fabrics), begun)
    if wanted != AUTO:
        return _named(wanted, observed, nodes, required)
    if required == FabricRequirement.ANY:
        return _offered(job, observed, nodes)
    return _required(job, observed, nodes, required)


def _named(
    wanted: str, observed: Observed, nodes: list[Node], required: FabricRequirement
) -> ChosenFabric | NoFabric:
    """Return the profile of this name, or why the job cannot use it."""
    profile = observed.fabrics.get(wanted)
    if profile is None:
        known = ", ".join(sorted(observed.fabrics))
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


def _offered(job: JobObject, observed: Observed, nodes: list[Node]) -> ChosenFabric | NoFabric:
    """Choose the profile of a job that requires nothing.

    A profile is taken only if all nodes fit and hold as many workers as without it, since it must
    not keep a job from nodes on which it could run. It is not taken if it has privileges, or if
    another one fits as well.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        nodes: Nodes on which a worker could run.

    Returns:
        The profile; the plain one, with the reason, if the nodes offer one that is not taken.
    """
    if _asks_itself(job, observed.fabrics):
        return ChosenFabric(OWN, str(OWN_SPEC.carries), {})
    if not _devices_of(job):
        return _plain("")
    best = _best(job, observed.fabrics, nodes, FabricRequirement.ANY)
    free = _best(
        job,
        {name: spec for name, spec in observed.fabrics.items() if not _privileged(spec)},
        nodes,
        FabricRequirement.ANY,
    )
    match free or best:
        case []:
            unclear = _unclear(job, observed.fabrics, nodes, FabricRequirement.ANY)
            return _plain(f"{unclear}; until then the pods use {PLAIN}" if unclear else "")
        case [name] if free:
            less = _refused(name, observed)
            return _plain(less) if less else _filled(name, observed.fabrics[name], nodes)
        case [name]:
            return _plain(_unasked(name, observed))
        case names:
            return _plain(f"{_ambiguous(names)}; until then the pods use {PLAIN}")


def _required(
    job: JobObject, observed: Observed, nodes: list[Node], required: FabricRequirement
) -> ChosenFabric | NoFabric:
    """Choose the profile of a job that requires a network; some nodes must offer it."""
    match _best(job, observed.fabrics, nodes, required):
        case [name]:
            return _filled(name, observed.fabrics[name], nodes)
        case []:
            pass
        case names:
            return NoFabric(f"spec.fabric.required: {required}, and {_ambiguous(names)}")
    if _asks_itself(job, observed.fabrics):
        return ChosenFabric(OWN, str(OWN_SPEC.carries), {})
    if unclear := _unclear(job, observed.fabrics, nodes, required):
        return NoFabric(f"spec.fabric.required: {required}, and {unclear}")
    return NoFabric(
        f"spec.fabric.required: {required}, and no profile that carries it fits the nodes of "
        f"this job ({len(nodes)} seen); looked for: {_offers(observed, required)}. Install the "
        "device plugin of the network, make a FabricProfile for it, or name one in "
        "spec.fabric.profile"
    )


def _plain(message: str) -> ChosenFabric:
    return ChosenFabric(PLAIN, str(FabricRequirement.ANY), {}, message)


def _best(
    job: JobObject,
    profiles: Mapping[str, FabricSpec],
    nodes: list[Node],
    required: FabricRequirement,
) -> list[str]:
    """Return the profiles that fit and have the highest priority: more than one if it is unclear.

    Args:
        job: The job.
        profiles: The profiles to choose from, by name.
        nodes: Nodes on which a worker could run.
        required: What the network must be able to do. If nothing, all nodes must fit, else some.

    Returns:
        Their names, sorted; empty if none fits.
    """
    devices = _devices_of(job)

    def fits(profile: FabricSpec) -> bool:
        if required != FabricRequirement.ANY:
            return any(_fits(profile, node) for node in nodes)
        return all(_fits(profile, node) and _holds(profile, node, devices) for node in nodes)

    fitting = {
        name: profile.priority or 0
        for name, profile in profiles.items()
        if nodes and _says_where(profile) and _carries(profile, required) and fits(profile)
    }
    highest = max(fitting.values(), default=0)
    return sorted(name for name, priority in fitting.items() if priority == highest)


def _ambiguous(names: list[str]) -> str:
    return (
        f"the profiles {' and '.join(names)} fit the nodes alike, so none is guessed; name one in "
        "spec.fabric.profile and make the job anew, or give one a higher priority"
    )


def _unclear(
    job: JobObject,
    profiles: Mapping[str, FabricSpec],
    nodes: list[Node],
    required: FabricRequirement,
) -> str:
    """Say which profiles would fit the nodes by their resources, but not by their labels.

    Two providers may give the same name to different resources, so that a resource alone does not
    say how many of it a pod should ask for.

    Args:
        job: The job.
        profiles: All profiles by name.
        nodes: Nodes on which a worker could run.
        required: What the network must be able to do.

    Returns:
        The resources, the profiles and what to do; empty if no profile is close.
    """
    devices = _devices_of(job)
    of_profile = {
        name: set((profile.pod.resources if profile.pod else None) or ()) - set(devices)
        for name, profile in sorted(profiles.items())
    }
    clear: set[str] = set()
    for name, own in of_profile.items():
        if any(_fits(profiles[name], node) for node in nodes):
            clear |= own
    close: dict[str, str] = {}
    resources: set[str] = set()
    for name, own in of_profile.items():
        offered = [all(node.offers.get(resource) for resource in own) for node in nodes]
        enough = any(offered) if required != FabricRequirement.ANY else all(offered)
        where = _where(profiles[name])
        if own and nodes and enough and where and not own & clear:
            close[name] = where
            resources |= own
    if not close:
        return ""
    listed = ", ".join(f"{name} (nodes with {where})" for name, where in close.items())
    return (
        f"the nodes offer {', '.join(sorted(resources))}, but their labels do not say whose "
        f"network it is, so none is guessed: it is that of the profiles {listed}. Name one in "
        "spec.fabric.profile and make the job anew, or make a FabricProfile for these nodes"
    )


def _where(profile: FabricSpec) -> str:
    """Describe the labels of the nodes of a profile; empty if it has no condition on labels."""
    match = profile.match
    labels = (match.node_labels if match else None) or {}
    expressions = (match.node_expressions if match else None) or ()
    parts = [f"{key}={value}" for key, value in labels.items()]
    for one in expressions:
        values = f" {', '.join(one.values)}" if one.values else ""
        parts.append(f"{one.key} {one.operator}{values}")
    return " and ".join(parts)


def _asks_itself(job: JobObject, profiles: Mapping[str, FabricSpec]) -> bool:
    """Return True if the template asks for a network by hand.

    Then it is the whole description of the pods, and nothing is added to it unasked.

    Args:
        job: The job.
        profiles: All profiles by name; they name the resources that stand for a network.

    Returns:
        True if the trainer has such a resource or a claim of dynamic resource allocation, or the
        pod is attached to further networks or mounts the RDMA devices of its node.
    """
    known = {
        name
        for profile in profiles.values()
        for name in (profile.pod.resources if profile.pod else None) or ()
        if not name.endswith(GPUS)
    }
    notes = (job.template.get("metadata") or {}).get("annotations") or {}
    volumes = job.template["spec"].get("volumes") or ()
    paths = ((volume.get("hostPath") or {}).get("path") or "" for volume in volumes)
    return (
        any(name in known or name.startswith(RDMA_RESOURCES) for name in _devices_of(job))
        or bool((trainer_of(job.template).get("resources") or {}).get("claims"))
        or any(note in notes for note in NETWORKS)
        or any(path.rstrip("/") == VERBS for path in paths)
    )


def _forbidden(observed: Observed, profile: FabricSpec) -> bool:
    """Return True if the last refusal is due to what the profile adds unasked."""
    refusal = observed.refusal
    if refusal is None or refusal.subject is not Subject.WORKER:
        return False
    if refusal.kind is RefusalKind.QUOTA:
        names = (profile.pod.resources if profile.pod else None) or ()
        return any(name in refusal.message for name in names)
    return refusal.kind is RefusalKind.FORBIDDEN or POD_SECURITY in refusal.message


def is_instead(job: JobObject, observed: Observed, fabric: ChosenFabric | NoFabric) -> bool:
    """Return True if this fabric replaces one that the API server has refused.

    A second refusal in a row is attributed to the template.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        fabric: The result of `fabric_of`.

    Returns:
        True if the refusal no longer applies to what would be created now.
    """
    refusal = observed.refusal
    if refusal is None or refusal.count > 1 or job.status.get("fabric"):
        return False
    return isinstance(fabric, ChosenFabric) and refusal.message in fabric.message


def _unasked(name: str, observed: Observed) -> str:
    carries = observed.fabrics[name].carries
    required = "" if carries == FabricRequirement.ANY else f"spec.fabric.required: {carries}, or "
    return (
        f"the nodes offer profile {name}, which gives pods privileges; nobody has asked for it, so "
        f"they use {PLAIN}. Write {required}spec.fabric.profile: {name}, and make the job anew"
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
        or pod.privileged
        or pod.host_network
        or any("hostPath" in volume for volume in parts.get("volumes", ()))
        or any(
            c.get("privileged")
            or (c.get("capabilities") or {}).get("add")
            or c.get("runAsUser") == 0
            for c in inside
        )
    )


def _refused(name: str, observed: Observed) -> str:
    if observed.refusal is None or not _forbidden(observed, observed.fabrics[name]):
        return ""
    return (
        f"the nodes offer profile {name}, and the namespace forbids it: "
        f"{observed.refusal.message}; the pods use {PLAIN}. Allow it (pod security: the label "
        "pod-security.kubernetes.io/enforce: privileged on the namespace), and make the job anew"
    )


def _candidates(job: JobObject, nodes: Iterable[Node]) -> list[Node]:
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


def _devices_of(job: JobObject) -> dict[str, int]:
    """Return the device resources that the trainer requests, such as nvidia.com/gpu, by name."""
    resources = trainer_of(job.template).get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    amounts = {name: amount_of(str(amount)) for name, amount in asked.items() if is_device(name)}
    return {name: amount for name, amount in amounts.items() if amount}


def _says_where(profile: FabricSpec) -> bool:
    """Return True if a profile can be matched with nodes, by labels or by device resources."""
    return bool(_where(profile) or (profile.pod and profile.pod.resources))


def _fits(profile: FabricSpec, node: Node) -> bool:
    """Return True if a node has the labels and at least the resources that a profile needs."""
    labels = {
        **((profile.pod.node_selector if profile.pod else None) or {}),
        **((profile.match.node_labels if profile.match else None) or {}),
    }
    expressions = (profile.match.node_expressions if profile.match else None) or ()
    return (
        all(node.labels.get(k) == v for k, v in labels.items())
        and all(_meets(expression, node) for expression in expressions)
        and _has_resources(profile, node)
    )


def _has_resources(profile: FabricSpec, node: Node) -> bool:
    resources = (profile.pod.resources if profile.pod else None) or {}
    return all(
        node.offers.get(name, 0) >= (1 if amount == ALL else int(amount))
        for name, amount in resources.items()
    )


def _meets(expression: NodeExpression, node: Node) -> bool:
    """Return True if a node meets a condition on its labels, as in a node affinity."""
    there, values = expression.key in node.labels, expression.values or ()
    match expression.operator:
        case NodeOperator.EXISTS:
            return there
        case NodeOperator.DOES_NOT_EXIST:
            return not there
        case NodeOperator.IN:
            return there and node.labels[expression.key] in values
        case NodeOperator.NOT_IN:
            return not there or node.labels[expression.key] not in values


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


def _offers(observed: Observed, required: FabricRequirement) -> str:
    """Describe the profiles for which `auto` has searched the nodes, for a message."""
    offers = [
        f"{name} ({', '.join((profile.pod.resources if profile.pod else None) or ['labels'])})"
        for name, profile in sorted(observed.fabrics.items())
        if _says_where(profile) and _carries(profile, required)
    ]
    return "; ".join(offers) or "nothing, since no profile carries it"


def _filled(name: str, profile: FabricSpec, nodes: list[Node]) -> ChosenFabric | NoFabric:
    """Return a profile with numbers in place of `All`: the least that any fitting node offers.

    If none fits by its labels, whoever named the profile knows better: the resources then decide.

    Args:
        name: Name of the profile.
        profile: The profile.
        nodes: Nodes on which a worker could run.

    Returns:
        The profile for the pods, or what no node offers.
    """
    pod: dict[str, Any] = {}
    if profile.pod is not None:
        pod = profile.pod.model_dump(mode="json", by_alias=True, exclude_none=True)
    amounts: dict[str, int | str] = dict(pod.get("resources") or {})
    fitting = [node for node in nodes if _fits(profile, node)] or [
        node for node in nodes if _has_resources(profile, node)
    ]
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
    return ChosenFabric(name, str(profile.carries), pod)
