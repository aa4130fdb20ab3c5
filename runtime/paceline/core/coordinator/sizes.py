"""Which ranks begin and which join when only some numbers of replicas may train.

`elasticity.allowedSizes`. A replica counts once all of its ranks are ready. The others stand by:
ready, asked for their promise in each change like everybody else, and no members. Nobody is turned
out: a job that loses replicas goes on with those that live, whatever their number, until the next
size is reached.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.core.ids import MemberId
from paceline.core.messages import pod_of

Pod = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Unset: any number of ranks may train, of whatever replicas."""

    allowed: tuple[int, ...] = ()
    """In replicas."""
    procs: int = 1

    def begin(self, ranks: Collection[MemberId], first: Collection[Pod] = ()) -> set[MemberId]:
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
        held = {pod_of(x) for x in inside}
        again = {x for x in outside if pod_of(x) in held}
        """Processes of replicas that train, started again."""
        pods = self._whole(set(outside) - again)
        room = self._largest(len(held) + len(pods)) - len(held)
        return again | {x for pod in sorted(pods)[: max(0, room)] for x in pods[pod]}

    def least(self, replicas: int) -> int:
        """The smallest size with which a job begins that wants at least so many."""
        return min((n for n in self.allowed if n >= replicas), default=replicas)

    def _largest(self, replicas: int) -> int:
        return max((n for n in self.allowed if n <= replicas), default=0)

    def _whole(self, ranks: Collection[MemberId]) -> dict[Pod, list[MemberId]]:
        """The replicas of which all ranks are there."""
        pods: dict[Pod, list[MemberId]] = {}
        for member in sorted(ranks):
            pods.setdefault(pod_of(member), []).append(member)
        return {
            pod: found
            for pod, found in pods.items()
            if len({member.local for member in found}) == self.procs
        }
