"""How a transport computes sums in the present group, as far as users need to know.

The metric and the text are made from one value, so they cannot contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Final

from paceline_api.types.enums import Wire

MACHINES_MAX: Final = 8
"""Upper bound on the machines that the text lists one by one."""


class Bits(StrEnum):
    """The reason why all ranks get the same bits (R23)."""

    ORDER = "order"
    """The order of the additions is fixed, or was shown to be fixed."""
    COMPARED = "compared"
    """The group tried the library's own allreduce, and all ranks got the same bits."""
    ONE_RANK = "one_rank"
    """They did not, so one rank reduces and broadcasts."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """How one transport computes sums in the present group."""

    transport: str
    """Name of the transport."""
    wire: Wire | None = Wire.FLOAT32
    """Type in which float32 sums travel; None if nothing travels."""
    bits: Bits = Bits.ORDER
    """Reason why all ranks get the same bits."""
    machines: tuple[int, ...] = ()
    """Machine of each rank, if sums have two levels (`Transport.machines`); else empty."""
    in_python: str = ""
    """Reason why the inner loop runs in Python; empty if it does not."""
    by_host: bool = False
    """True if the transport cannot access the memory of the gradients, so they go through host
    memory."""

    @property
    def travels_as(self) -> str:
        """Value of the metric's `wire` label."""
        return self.wire or "none"


def describe_conduct(conduct: Conduct) -> str:
    """Describe a conduct for users; empty if there is nothing to add to the transport's name."""
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
    """Describe which ranks share a machine."""
    count = max(numbers) + 1
    ranks = [[rank for rank, on in enumerate(numbers) if on == m] for m in range(count)]
    listed = [_ranges(on) for on in ranks[:MACHINES_MAX]]
    more = f" and {count - MACHINES_MAX} more" if count > MACHINES_MAX else ""
    return f"{count} machines (ranks {' | '.join(listed)}{more})"


def _ranges(ranks: Sequence[int]) -> str:
    """Format ascending ranks as ranges, such as `0-3, 6`."""
    ranges = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *rest = [rank for _, rank in run]
        ranges.append(f"{first}-{rest[-1]}" if rest else str(first))
    return ", ".join(ranges)
