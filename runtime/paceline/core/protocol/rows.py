"""Short form of a set of members (R44).

Pods that were started alike have the same ranks. So a set of a thousand members is one row, and one
or two more for each pod that differs from its neighbors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from paceline_api.ids import MemberId


class PodRow(NamedTuple):
    """Neighboring pods with the same ranks."""

    first: int
    """Slot of the first of these pods."""
    last: int
    """Slot of the last of these pods, inclusive."""
    ranks: tuple[tuple[int, int], ...]
    """(local, attempt) of the ranks in each of these pods."""


Rows = tuple[PodRow, ...]


def rows_of(members: Iterable[MemberId]) -> Rows:
    """Return the rows for `members`, which are in rank order and each occur once."""
    rows: list[PodRow] = []
    for slot, group in groupby(members, key=lambda m: m.slot):
        ranks = tuple((m.local, m.attempt) for m in group)
        before = rows[-1] if rows else None
        if before is not None and before.last == slot - 1 and before.ranks == ranks:
            rows[-1] = before._replace(last=slot)
        else:
            rows.append(PodRow(slot, slot, ranks))
    return tuple(rows)


@lru_cache(maxsize=64)  # many reports name the same few sets
def members_of(rows: Rows) -> tuple[MemberId, ...]:
    """Return the members of these rows, in rank order; inverse of `rows_of`."""
    return tuple(
        MemberId(slot, local, attempt)
        for first, last, ranks in rows
        for slot in range(first, last + 1)
        for local, attempt in ranks
    )
