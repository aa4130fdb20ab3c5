"""How a transport sums in the group that is wired now, beyond its name: what a user sees of it.

One value for metric and words, so that they cannot say different things.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Final

from paceline_api.types.enums import Wire

MACHINES_MAX: Final = 8
"""So many are told one by one."""


class Bits(StrEnum):
    """Why all ranks get the same ones (R23)."""

    ORDER = "order"
    """Of the additions: it is fixed, or was shown to be."""
    COMPARED = "compared"
    """The group has tried a library's own allreduce, and they were."""
    ONE_RANK = "one_rank"
    """They were not, so one rank reduces and broadcasts."""


@dataclass(frozen=True, slots=True)
class Conduct:
    transport: str
    wire: Wire | None = Wire.FLOAT32
    """What float32 sums travel as; None where nothing travels."""
    bits: Bits = Bits.ORDER
    machines: tuple[int, ...] = ()
    """Of each rank, where sums have two levels (`Transport.machines`)."""
    in_python: str = ""
    """Why its loop runs in Python; empty where it does not."""
    by_host: bool = False
    """Gradients are in a memory that it does not reach, and go through the host's."""

    @property
    def travels_as(self) -> str:
        """For a label."""
        return self.wire or "none"


def told(conduct: Conduct) -> str:
    """In words; empty if there is nothing to know beside its name."""
    parts = []
    if conduct.machines:
        parts.append(f"{_machines(conduct.machines)}, slices are summed inside, then between")
    if conduct.wire is Wire.BFLOAT16:
        parts.append("float32 travels as BFloat16")
    if conduct.bits is Bits.COMPARED:
        parts.append("its allreduce gave all ranks the same bits")
    elif conduct.bits is Bits.ONE_RANK:
        parts.append("one rank reduces and broadcasts, since its allreduce gave ranks other bits")
    if conduct.by_host:
        parts.append("gradients go through host memory")
    if conduct.in_python:
        parts.append(f"its loop runs in Python ({conduct.in_python})")
    return f"{conduct.transport}: {', '.join(parts)}" if parts else ""


def _machines(numbers: Sequence[int]) -> str:
    count = max(numbers) + 1
    ranks = [[rank for rank, on in enumerate(numbers) if on == m] for m in range(count)]
    listed = [_ranges(on) for on in ranks[:MACHINES_MAX]]
    more = f" and {count - MACHINES_MAX} more" if count > MACHINES_MAX else ""
    return f"{count} machines (ranks {' | '.join(listed)}{more})"


def _ranges(ranks: Sequence[int]) -> str:
    """0-3, 6"""
    found = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *rest = [rank for _, rank in run]
        found.append(f"{first}-{rest[-1]}" if rest else str(first))
    return ", ".join(found)
