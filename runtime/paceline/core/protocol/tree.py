"""Who talks to whom about a round, so that no rank has to hear or tell thousands (R41).

Up to `TREE_ABOVE` members everybody announces to the starter, which sends GO to all. Above, the
members are a grid: groups of about the square root of them, in rank order, so that the ranks of a
pod lie together. In each round one active rank of each group is its head; ranks announce to their
head, heads to the starter, and GO takes the same ways back. Heads of one round stand at the same
place of their groups and the starter is one of them, so over all rounds a rank talks to those of
its own group and to those at its own place in the others, and to nobody else.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from math import isqrt
from typing import Final

from paceline.core.protocol.ids import MemberId

TREE_ABOVE: Final = 64
"""Members of a generation who talk to one rank directly."""
BRANCHES: Final = 2
"""So many copies of a state leave one rank (R45)."""


def branches(joiners: Sequence[MemberId]) -> Iterator[tuple[MemberId, tuple[MemberId, ...]]]:
    """To whom a state goes directly, each with those to whom that one passes it on. Neighbours
    stay together: they are likely to be in one pod."""
    cuts = [len(joiners) * part // BRANCHES for part in range(BRANCHES + 1)]
    for low, high in pairwise(cuts):
        if low < high:
            yield joiners[low], tuple(joiners[low + 1 : high])


class Grid:
    """The groups of one generation, as long as the same members are active."""

    def __init__(self, members: Sequence[MemberId], active: Container[MemberId]) -> None:
        """`active`: at least one of the members."""
        rows = isqrt(len(members) - 1) + 1
        cuts = [len(members) * row // rows for row in range(rows + 1)]
        self.groups: Final = tuple(tuple(members[a:b]) for a, b in pairwise(cuts))
        self.number: Final = {m: row for row, group in enumerate(self.groups) for m in group}
        """Of each member's group."""
        self._active = active
        self._width = max(map(len, self.groups))

    def head(self, group: int, round_: int) -> MemberId | None:
        """Who collects in this group; None without an active rank in it."""
        row = self.groups[group]
        first = round_ % self._width % len(row)
        return next((m for m in (*row[first:], *row[:first]) if m in self._active), None)

    def starter(self, round_: int) -> MemberId:
        """The head of one group, another one when all places of a group had their turn."""
        turn = round_ // self._width % len(self.groups)
        order = [*range(turn, len(self.groups)), *range(turn)]
        heads = (self.head(group, round_) for group in order)
        return next(m for m in heads if m is not None)

    def first_active(self, member: MemberId) -> MemberId | None:
        """The lowest active rank of this member's group."""
        return self.head(self.number[member], 0)

    def collector(self, member: MemberId, round_: int) -> MemberId:
        """To whom it announces."""
        head = self.head(self.number[member], round_)
        return self.starter(round_) if head is None else head

    def ways(self, starter: MemberId, round_: int) -> dict[MemberId, tuple[MemberId, ...]]:
        """To whom the starter sends GO, each with those to whom that one passes it on."""
        found: dict[MemberId, tuple[MemberId, ...]] = {}
        for number, group in enumerate(self.groups):
            if starter in group:
                found |= dict.fromkeys((m for m in group if m != starter), ())
            else:
                head = self.head(number, round_) or group[0]
                found[head] = tuple(m for m in group if m != head)
        return found
