"""Sets of members in few words (R44).

Pods that were started alike have the same ranks, so a set of a thousand members is one row, and one
more for each pod that is unlike its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from paceline.core.protocol.ids import MemberId


class Row(NamedTuple):
    """Neighbouring pods with the same ranks."""

    first: int
    """Slots, the last one included."""
    last: int
    ranks: tuple[tuple[int, int], ...]
    """(local, attempt) in each of these pods."""


Rows = tuple[Row, ...]


def rows_of(members: Iterable[MemberId]) -> Rows:
    """`members` in rank order, each once."""
    rows: list[Row] = []
    for slot, group in groupby(members, key=lambda m: m.slot):
        ranks = tuple((m.local, m.attempt) for m in group)
        before = rows[-1] if rows else None
        if before is not None and before.last == slot - 1 and before.ranks == ranks:
            rows[-1] = before._replace(last=slot)
        else:
            rows.append(Row(slot, slot, ranks))
    return tuple(rows)


@lru_cache(maxsize=64)  # a thousand reports name the same few sets
def members_of(rows: Rows) -> tuple[MemberId, ...]:
    """Inverse of `rows_of`."""
    return tuple(
        MemberId(slot, local, attempt)
        for first, last, ranks in rows
        for slot in range(first, last + 1)
        for local, attempt in ranks
    )
