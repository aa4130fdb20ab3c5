"""How the contributions of one round become an update (D3); worked out by `core.log.Log.weigh`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.ids import MemberId
from paceline.core.records import Share


@dataclass(frozen=True, slots=True)
class Weighing:
    """How the contributions of one round become an update; equal on all ranks."""

    contributors: tuple[MemberId, ...]
    unit: int
    """Common unit of the contributed buffers, or 1 where each is multiplied by its own (D3)."""
    equal: bool
    """Buffers are summed as they are: mean of means, the bits of the plain reference."""
    samples: int
    first: bool
    """The accumulated sum starts anew with this round."""
    step: bool
    """The optimizer steps."""
    divisor: float
    """Of the accumulated sum, in units of `unit`."""
    scheduler_steps: int

    def factor(self, share: Share) -> float:
        """What the contributor of `share` multiplies its buffer with before the reduction."""
        return 1.0 if self.equal else float(share.unit)
