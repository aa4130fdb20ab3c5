"""The time of an allreduce: alpha seconds per step of a ring, beta seconds per byte sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from paceline.core.forecast.fitting import fit_two


@dataclass(frozen=True, slots=True)
class MeasuredSum:
    """One measured reduction of one segment."""

    members: int
    """Number of members that took part."""
    payload_bytes: int
    seconds: float
    """Seconds from its beginning to its end on the rank that waited least."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The two coefficients of the allreduce model."""

    alpha_s: float
    """Latency of one step of the ring, in seconds."""
    beta_s_per_byte: float
    """Inverse bandwidth: seconds for each byte that a rank sends."""

    @classmethod
    def fit(cls, sums: Iterable[MeasuredSum]) -> Self:
        """Fit both coefficients to measured reductions; those of a single member are ignored."""
        points = [(*_ring(s.members, s.payload_bytes), s.seconds) for s in sums if s.members > 1]
        return cls(*fit_two(points))

    def seconds(self, members: int, payload_bytes: float) -> float:
        """Return the forecast seconds of an allreduce of `payload_bytes`; 0 for one member."""
        steps, moved = _ring(members, payload_bytes)
        return steps * self.alpha_s + moved * self.beta_s_per_byte


def _ring(members: int, payload_bytes: float) -> tuple[float, float]:
    """Return the steps of a ring, and the bytes that each rank sends.

    The formulas are those of the ring (docs/transports.md, Algorithms over MPI).

    Returns:
        (steps, bytes).
    """
    return 2.0 * (members - 1), 2.0 * payload_bytes * (members - 1) / members
