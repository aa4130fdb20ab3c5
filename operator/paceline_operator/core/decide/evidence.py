"""Which pods may still have processes: the numbered inventory of R25, by the rules of C4.

A pod leaves it when the cluster says that it is dead and its ranks are silent at the coordinator.
A deletionTimestamp is a drain, not a death; a heartbeat overrules everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final

from paceline_operator.core.job import Job
from paceline_operator.core.observed import Inventory, Observed, Pod

GONE_S: Final = 10.0
"""A node that the watch does not show may be too new for it."""
LOOK_S: Final = 1.0
SPEAKS_LOOK_S: Final = 5.0
"""All jobs of a cluster may look so often: each node may be away for its kubelet alone."""
POLL_S: Final = 50
"""So long a coordinator that has nothing to tell keeps the operator's question."""
REPLY_S: Final = 10
"""So long an answer may take to come."""
FOUND_S: Final = 20.0
"""A new coordinator needs so long to start and to be found by the ranks."""

Places = Set[tuple[int, int]]
"""Slot and attempt of pods."""


@dataclass(frozen=True, slots=True)
class Loss:
    why: str = ""
    """Why the pod counts as gone with its node; empty if it does not."""
    look_again_s: float | None = None
    node_missing_s: float | None = None
    """Since when the watch of nodes does not show its node; None: it does, or is blind."""


def speaking(seen: Observed) -> Places:
    """Pods with a rank that the coordinator hears."""
    return seen.coordinator.speaking_pods() if seen.coordinator is not None else set()


def answers(pod: Pod, seen: Observed, now_s: float) -> bool:
    """Whether the operator itself hears this coordinator."""
    coordinator = seen.coordinator
    return (
        coordinator is not None
        and coordinator.pod_uid == pod.uid
        and now_s - seen.coordinator_heard_s < POLL_S + REPLY_S
    )


def lost(pod: Pod, seen: Observed, *, speaks: bool, node_lost_s: float, now_s: float) -> Loss:
    """Whether the pod's node has taken it along. `speaks`: somebody hears its processes."""
    if not pod.node or not seen.nodes_fresh or not seen.nodes:
        return Loss()
    node = seen.nodes.get(pod.node)
    if (node is None or node.troubled) and speaks:
        return Loss(look_again_s=now_s + SPEAKS_LOOK_S)  # only its kubelet is away
    if node is None:
        first_s = seen.clocks.node_missing_s.get(pod.node, now_s)
        if now_s - first_s >= GONE_S:
            return Loss(f"node {pod.node} of {pod.name} is gone", node_missing_s=first_s)
        return Loss(look_again_s=first_s + GONE_S, node_missing_s=first_s)
    if node.out_of_service:
        return Loss(f"node {pod.node} of {pod.name} is out of service")
    if node.ready:
        return Loss()
    away = sum(not other.ready for other in seen.nodes.values())
    if 2 * away > len(seen.nodes):
        # More likely that the cluster is blind than that most of it has died.
        return Loss(look_again_s=now_s + node_lost_s)
    # A pod that was made meanwhile has its own time.
    due_s = max(node.not_ready_since_s, pod.created_s) + node_lost_s
    if pod.is_worker:
        # It may live and not have found its new coordinator yet.
        due_s = max([due_s, *(made_s + FOUND_S for made_s in _coordinators_made(pod, seen))])
    if now_s < due_s:
        return Loss(look_again_s=due_s)
    return Loss(f"node {pod.node} of {pod.name} has been NotReady for {node_lost_s:.0f} s")


def _coordinators_made(pod: Pod, seen: Observed) -> Iterable[float]:
    """When the present coordinators of a pod's job were made."""
    return (p.created_s for p in seen.own(pod.owner) if p.is_coordinator and p.active)


def may_live(
    job: Job, seen: Observed, losses: dict[str, str]
) -> tuple[frozenset[tuple[int, int]], bool]:
    """Pods that may have processes, and whether one of them is there for its heartbeat alone.

    `losses`: pods that are gone with their node, by uid.
    """
    heard = speaking(seen)
    workers = [pod for pod in seen.own(job.uid) if pod.is_worker]
    found: set[tuple[int, int]] = set()
    overruled = False
    for pod in workers:
        place = (pod.slot, pod.attempt)
        proven = pod.ended or pod.uid in losses
        if not proven:
            found.add(place)
        elif place in heard:
            found.add(place)
            overruled = True
    known = {(pod.slot, pod.attempt) for pod in workers}
    ghosts = heard - known
    return frozenset(found | ghosts), overruled or bool(ghosts)


def next_inventory(
    seen: Observed, living: frozenset[tuple[int, int]], planned: Iterable[tuple[int, int]]
) -> Inventory | None:
    """The inventory to send; None if the coordinator has it.

    Planned pods are in it: no process may start before the revision that names its pod exists.
    """
    if seen.coordinator is None:
        return None
    pods = living | frozenset(planned)
    sent, coordinator = seen.sent, seen.coordinator
    if pods == sent.inventory and sent.revision:
        forgotten = (
            coordinator.inventory < sent.revision and seen.coordinator_heard_s > sent.inventory_s
        )
        if not forgotten:
            return None
    floor = seen.epoch << 32
    revision = max(sent.revision, coordinator.inventory, floor) + 1
    return Inventory(revision, tuple(sorted(pods)))
