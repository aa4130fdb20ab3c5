"""Routes of announcements and GO, so that no rank exchanges messages with thousands (R41).

Up to `TREE_ABOVE` members, all ranks announce to the starter, which sends GO to all. Above that,
the members form a grid: groups of about the square root of their number, in rank order, so that the
ranks of a pod are together. In each round one active rank of each group is its head. Ranks announce
to their head and heads to the starter; GO takes the same routes back. The heads of one round are at
the same place in their groups, and the starter is one of them. So over all rounds a rank exchanges
messages with its own group and with the ranks at its own place in the others, and with no others.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from math import isqrt
from typing import Final

from paceline_api.ids import MemberId

TREE_ABOVE: Final = 64
"""Largest number of members that exchange messages with the starter directly."""
BRANCHES: Final = 2
"""Number of copies of a state that one rank sends at most (R45)."""


def branches(joiners: Sequence[MemberId]) -> Iterator[tuple[MemberId, tuple[MemberId, ...]]]:
    """Split the receivers of a state among those to whom this rank sends it directly.

    Neighbors stay together, since they are likely to be in one pod.

    Args:
        joiners: All ranks that have to receive the state, in rank order.

    Yields:
        At most `BRANCHES` direct receivers, each with the ranks to which it forwards the state.
    """
    cuts = [len(joiners) * part // BRANCHES for part in range(BRANCHES + 1)]
    for low, high in pairwise(cuts):
        if low < high:
            yield joiners[low], tuple(joiners[low + 1 : high])


class Grid:
    """Groups of one generation, and their heads while the same members are active."""

    def __init__(self, members: Sequence[MemberId], active: Container[MemberId]) -> None:
        """Divide the members into groups.

        Args:
            members: Members of the generation, in rank order.
            active: Active ranks, at least one of the members.
        """
        rows = isqrt(len(members) - 1) + 1
        cuts = [len(members) * row // rows for row in range(rows + 1)]
        self.groups: Final = tuple(tuple(members[a:b]) for a, b in pairwise(cuts))
        self.number: Final = {m: row for row, group in enumerate(self.groups) for m in group}
        """Number of the group of each member."""
        self._active = active
        self._width = max(map(len, self.groups))

    def head(self, group: int, round_: int) -> MemberId | None:
        """Return the rank that collects the announcements of a group; None without active rank."""
        row = self.groups[group]
        first = round_ % self._width % len(row)
        return next((m for m in (*row[first:], *row[:first]) if m in self._active), None)

    def starter(self, round_: int) -> MemberId:
        """Return the head that starts a round. The group changes once all places had their turn."""
        turn = round_ // self._width % len(self.groups)
        order = [*range(turn, len(self.groups)), *range(turn)]
        heads = (self.head(group, round_) for group in order)
        return next(m for m in heads if m is not None)

    def first_active(self, member: MemberId) -> MemberId | None:
        """Return the lowest active rank in the group of a member; None if there is none."""
        return self.head(self.number[member], 0)

    def collector(self, member: MemberId, round_: int) -> MemberId:
        """Return the rank to which a member announces: the head of its group or the starter."""
        head = self.head(self.number[member], round_)
        return self.starter(round_) if head is None else head

    def ways(self, starter: MemberId, round_: int) -> dict[MemberId, tuple[MemberId, ...]]:
        """Return the routes of GO.

        Args:
            starter: Rank that sends GO.
            round_: Round that GO starts.

        Returns:
            Members to whom the starter sends GO, each with the members to whom that one forwards
            it.
        """
        routes: dict[MemberId, tuple[MemberId, ...]] = {}
        for number, group in enumerate(self.groups):
            if starter in group:
                routes |= dict.fromkeys((m for m in group if m != starter), ())
            else:
                head = self.head(number, round_) or group[0]
                routes[head] = tuple(m for m in group if m != head)
        return routes
