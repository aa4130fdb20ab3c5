"""Whose replicas train: who begins and joins when only some sizes may, and who leaves (C9).

`elasticity.allowedSizes`: a replica counts once all of its ranks are ready. The others stand by:
ready, asked for their promise in each change like everybody else, and no members. Nobody is turned
out: a job that loses replicas goes on with those that live, whatever their number, until the next
size is reached.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.core.coordinator.roster import KnownPod, Roster
from paceline.core.messages import pod_of
from paceline.core.protocol.ids import MemberId

PodKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Unset: any number of ranks may train, of whatever replicas."""

    allowed: tuple[int, ...] = ()
    """In replicas."""
    procs: int = 1

    def begin(self, ranks: Collection[MemberId], first: Collection[PodKey] = ()) -> set[MemberId]:
        """Who of these begins; replicas in `first` before others. Empty below the smallest size."""
        if not self.allowed:
            return set(ranks)
        pods = self._whole(ranks)
        order = sorted(pods, key=lambda pod: (pod not in first, pod))
        return {x for pod in order[: self._largest(len(pods))] for x in pods[pod]}

    def join(self, inside: Collection[MemberId], outside: Collection[MemberId]) -> set[MemberId]:
        """Who of those outside comes in. Where nobody is inside somebody does, whatever the size,
        to take the state over from those that leave."""
        if not self.allowed:
            return set(outside)
        if not inside:
            return self.begin(outside) or set(outside)
        occupied = {pod_of(x) for x in inside}
        again = {x for x in outside if pod_of(x) in occupied}
        """Processes of replicas that train, started again."""
        pods = self._whole(set(outside) - again)
        room = self._largest(len(occupied) + len(pods)) - len(occupied)
        return again | {x for pod in sorted(pods)[: max(0, room)] for x in pods[pod]}

    def least(self, replicas: int) -> int:
        """The smallest size with which a job begins that wants at least so many."""
        return min((n for n in self.allowed if n >= replicas), default=replicas)

    def _largest(self, replicas: int) -> int:
        return max((n for n in self.allowed if n <= replicas), default=0)

    def _whole(self, ranks: Collection[MemberId]) -> dict[PodKey, list[MemberId]]:
        """The replicas of which all ranks are there."""
        pods: dict[PodKey, list[MemberId]] = {}
        for member in sorted(ranks):
            pods.setdefault(pod_of(member), []).append(member)
        return {
            pod: found
            for pod, found in pods.items()
            if len({member.local for member in found}) == self.procs
        }


def pods_to_drain(
    roster: Roster, replicas: int, members: Collection[MemberId] | None
) -> list[KnownPod]:
    """Pods to drain now that fewer replicas are wanted: those that do not train first, then those
    whose loops have ended, then the slowest, then the newest slot.

    `members`: None before this coordinator has formed a generation; who has state trains."""
    inventory = roster.listed if roster.inventory else None
    newest = dict(sorted(roster.pods))
    living = [
        p
        for key, p in sorted(roster.pods.items())
        if not p.done
        and not p.draining
        and p.connected
        and (inventory is None or key in inventory)
        and newest[p.slot] == p.attempt
    ]
    surplus = len(living) - replicas
    if surplus <= 0:
        return []

    def order(pod: KnownPod) -> tuple[bool, bool, float, int]:
        ranks = [roster.ranks[x] for x in pod.living if x in roster.ranks]
        running = bool(ranks) and all(
            r.has_state if members is None else r.member in members for r in ranks
        )
        busy = not all(r.done for r in ranks)
        step_s = max((r.step_s for r in ranks), default=0.0)
        return (running, busy, -step_s, -pod.slot)

    return sorted(living, key=order)[:surplus]
