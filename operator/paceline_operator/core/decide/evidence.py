"""The numbered inventory of pods that may still have processes (R25), by the rules of C4.

A pod leaves the inventory when the cluster reports it as dead and its ranks are silent at the
coordinator. A deletionTimestamp is a drain and not a death. A heartbeat overrules everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final

from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed, Pod, PodInventory

GONE_S: Final = 10.0
"""Seconds after which a node that the watch does not show counts as gone. A new node may appear
late."""
LOOK_S: Final = 1.0
"""Seconds until the next decision while heartbeats contradict the cluster."""
SPEAKS_LOOK_S: Final = 5.0
"""Seconds until the next look at a pod that has heartbeats while its node is away. All jobs of a
cluster can afford this rate."""
POLL_S: Final = 50
"""Seconds that a coordinator without news holds the operator's long poll."""
REPLY_S: Final = 10
"""Upper bound on the duration of an answer, in seconds."""
FOUND_S: Final = 20.0
"""Seconds that a new coordinator may take to start and to be discovered by the ranks."""

Places = Set[tuple[int, int]]
"""Slot and attempt of pods."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Verdict on a pod whose node may have failed."""

    why: str = ""
    """Reason why the pod counts as lost with its node; empty if it does not."""
    look_again_s: float | None = None
    node_missing_s: float | None = None
    """Time since which the watch of nodes lacks the node; None if it shows the node or is not
    usable."""


def speaking(observed: Observed) -> Places:
    """Return the pods that have a rank with a recent heartbeat at the coordinator."""
    return observed.coordinator.speaking_pods() if observed.coordinator is not None else set()


def answers(pod: Pod, observed: Observed, now_s: float) -> bool:
    """Return True if the operator itself has recently received an answer from this coordinator."""
    coordinator = observed.coordinator
    return (
        coordinator is not None
        and coordinator.coordinator == pod.uid
        and now_s - observed.coordinator_heard_s < POLL_S + REPLY_S
    )


def lost(pod: Pod, observed: Observed, *, speaks: bool, node_lost_s: float, now_s: float) -> Loss:
    """Decide whether a pod is lost with its node.

    If more than half of all nodes are NotReady, nothing is concluded: it is more likely that the
    cluster cannot see its nodes than that most of them have died (C4).

    Args:
        pod: The pod.
        observed: Everything observed besides the job.
        speaks: True if the pod's processes answer the operator or the coordinator.
        node_lost_s: Seconds of NotReady after which a node counts as lost.
        now_s: The present time.

    Returns:
        The verdict.
    """
    if not pod.node or not observed.nodes_fresh or not observed.nodes:
        return Loss()
    node = observed.nodes.get(pod.node)
    if (node is None or node.troubled) and speaks:
        return Loss(look_again_s=now_s + SPEAKS_LOOK_S)  # only its kubelet is away
    if node is None:
        first_s = observed.clocks.node_missing_s.get(pod.node, now_s)
        if now_s - first_s >= GONE_S:
            return Loss(f"node {pod.node} of {pod.name} is gone", node_missing_s=first_s)
        return Loss(look_again_s=first_s + GONE_S, node_missing_s=first_s)
    if node.out_of_service:
        return Loss(f"node {pod.node} of {pod.name} is out of service")
    if node.ready:
        return Loss()
    away = sum(not other.ready for other in observed.nodes.values())
    if 2 * away > len(observed.nodes):
        # It is more likely that the cluster cannot see its nodes than that most have died.
        return Loss(look_again_s=now_s + node_lost_s)
    # For a pod that is younger than the failure, the time starts with its creation.
    due_s = max(node.not_ready_since_s, pod.created_s) + node_lost_s
    if pod.is_worker:
        # The worker may live and not have found a new coordinator yet.
        due_s = max([due_s, *(made_s + FOUND_S for made_s in _coordinators_made(pod, observed))])
    if now_s < due_s:
        return Loss(look_again_s=due_s)
    return Loss(f"node {pod.node} of {pod.name} has been NotReady for {node_lost_s:.0f} s")


def _coordinators_made(pod: Pod, observed: Observed) -> Iterable[float]:
    """Return the creation times of the active coordinators of a pod's job."""
    return (p.created_s for p in observed.own(pod.owner) if p.is_coordinator and p.active)


def may_live(
    job: JobObject, observed: Observed, losses: dict[str, str]
) -> tuple[frozenset[tuple[int, int]], bool]:
    """Return the pods that may have processes.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        losses: Reasons why pods are lost with their node, by uid.

    Returns:
        Slot and attempt of the pods, and True if one of them is included only because of its
        heartbeat.
    """
    speakers = speaking(observed)
    workers = [pod for pod in observed.own(job.uid) if pod.is_worker]
    places: set[tuple[int, int]] = set()
    overruled = False
    for pod in workers:
        place = (pod.slot, pod.attempt)
        proven = pod.ended or pod.uid in losses
        if not proven:
            places.add(place)
        elif place in speakers:
            places.add(place)
            overruled = True
    known = {(pod.slot, pod.attempt) for pod in workers}
    ghosts = speakers - known
    return frozenset(places | ghosts), overruled or bool(ghosts)


def next_inventory(
    observed: Observed, living: frozenset[tuple[int, int]], planned: Iterable[tuple[int, int]]
) -> PodInventory | None:
    """Return the inventory to send; None if the coordinator already has it.

    It includes planned pods: no process may start before a revision that names its pod exists.

    Args:
        observed: Everything observed besides the job.
        living: Pods that may have processes.
        planned: Pods that this decision creates.

    Returns:
        The inventory with a revision above all earlier ones.
    """
    if observed.coordinator is None:
        return None
    pods = living | frozenset(planned)
    sent, coordinator = observed.sent, observed.coordinator
    if pods == sent.inventory and sent.revision:
        forgotten = (
            coordinator.inventory < sent.revision
            and observed.coordinator_heard_s > sent.inventory_s
        )
        if not forgotten:
            return None
    floor = observed.epoch << 32
    revision = max(sent.revision, coordinator.inventory, floor) + 1
    return PodInventory(revision, tuple(sorted(pods)))
