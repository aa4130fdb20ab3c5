"""Choice of replicas under `elasticity.allowedSizes`: who begins, joins and is drained (C9, S1).

A replica counts once all of its ranks are ready. The other replicas stand by: they are ready, they
are asked for a promise in each change, and they are not members. No member is removed to reach an
allowed size: a job that loses replicas continues with those that live, whatever their number, until
the next size is reached.

A script that steps its own optimizers knows how many ranks it was started with, and has work for
no more. Ranks of further replicas stand by as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline_api.ids import MemberId, pod_of
from paceline_api.status import place_of

from paceline.core.coordinator.roster import KnownPod, Roster

PodKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of replicas that may train. Without any, every number of ranks may."""

    allowed: tuple[int, ...] = ()
    """Allowed numbers of replicas; empty if any number is allowed."""
    procs: int = 1
    """Number of ranks per replica."""
    places: int = 0
    """Number of ranks that a script has work for (S1); 0 if any number has."""

    def begin(self, ranks: Collection[MemberId], first: Collection[PodKey] = ()) -> set[MemberId]:
        """Return the ranks that begin a generation which has no living predecessor.

        Args:
            ranks: The ranks that are ready.
            first: Replicas that are preferred to others.

        Returns:
            All ranks of the largest allowed number of whole replicas. Empty if there are fewer than
            the smallest allowed size.
        """
        ranks = self._with_place(ranks)
        if not self.allowed:
            return ranks
        pods = self._whole(ranks)
        order = sorted(pods, key=lambda pod: (pod not in first, pod))
        return {x for pod in order[: self._largest(len(pods))] for x in pods[pod]}

    def join(self, inside: Collection[MemberId], outside: Collection[MemberId]) -> set[MemberId]:
        """Return the ranks that are admitted to a running group.

        Where no rank is inside, some are admitted whatever the size: they have to take the state
        over from the ranks that leave.

        Args:
            inside: Members that stay.
            outside: Ranks that are ready and not members.

        Returns:
            The ranks of `outside` to admit.
        """
        outside = self._with_place(outside)
        if not self.allowed:
            return outside
        if not inside:
            return self.begin(outside) or set(outside)
        occupied = {pod_of(x) for x in inside}
        again = {x for x in outside if pod_of(x) in occupied}
        """Restarted processes of replicas that train already."""
        pods = self._whole(set(outside) - again)
        room = self._largest(len(occupied) + len(pods)) - len(occupied)
        return again | {x for pod in sorted(pods)[: max(0, room)] for x in pods[pod]}

    def least(self, replicas: int) -> int:
        """Return the smallest allowed number of replicas that is at least `replicas`."""
        return min((n for n in self.allowed if n >= replicas), default=replicas)

    def _with_place(self, ranks: Collection[MemberId]) -> set[MemberId]:
        """Return the ranks that a script has work for."""
        if not self.places:
            return set(ranks)
        return {x for x in ranks if place_of(x, self.procs) < self.places}

    def _largest(self, replicas: int) -> int:
        return max((n for n in self.allowed if n <= replicas), default=0)

    def _whole(self, ranks: Collection[MemberId]) -> dict[PodKey, list[MemberId]]:
        """Return the replicas of which all ranks are present, with these ranks."""
        pods: dict[PodKey, list[MemberId]] = {}
        for member in sorted(ranks):
            pods.setdefault(pod_of(member), []).append(member)
        return {
            pod: members
            for pod, members in pods.items()
            if len({member.local for member in members}) == self.procs
        }


def pods_to_drain(
    roster: Roster,
    replicas: int,
    members: Collection[MemberId] | None,
    last: int | None = None,
) -> list[KnownPod]:
    """Return the pods to drain because fewer replicas are wanted.

    Pods that do not train come first, then those whose loops have ended, then the slowest, then the
    newest slot.

    Args:
        roster: Known ranks and pods.
        replicas: Number of replicas wanted.
        members: Members of the generation in force. None before this coordinator has formed one: a
            rank with state counts as training then.
        last: Slot that is drained only after all others; None if no slot is special.

    Returns:
        The surplus pods, in that order.
    """
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

    def order(pod: KnownPod) -> tuple[bool, bool, bool, float, int]:
        ranks = [roster.ranks[x] for x in pod.living if x in roster.ranks]
        running = bool(ranks) and all(
            r.has_state if members is None else r.member in members for r in ranks
        )
        busy = not all(r.beat.done for r in ranks)
        step_s = max((r.beat.step_s for r in ranks), default=0.0)
        return (pod.slot == last, running, busy, -step_s, -pod.slot)

    return sorted(living, key=order)[:surplus]
