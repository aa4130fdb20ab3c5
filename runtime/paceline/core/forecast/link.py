"""Seconds of an allreduce: a ring's steps at alpha each, its bytes at beta each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from paceline.core.forecast.fitting import fit_two


@dataclass(frozen=True, slots=True)
class Sum:
    """One reduction of one segment that was measured."""

    members: int
    payload_bytes: int
    seconds: float
    """From its beginning to its end on the rank that waited least."""


@dataclass(frozen=True, slots=True)
class Link:
    alpha_s: float
    """Of one step of the ring."""
    beta_s_per_byte: float

    @classmethod
    def fit(cls, sums: Iterable[Sum]) -> Self:
        points = [(*_ring(s.members, s.payload_bytes), s.seconds) for s in sums if s.members > 1]
        return cls(*fit_two(points))

    def seconds(self, members: int, payload_bytes: float) -> float:
        """0 for one member."""
        steps, moved = _ring(members, payload_bytes)
        return steps * self.alpha_s + moved * self.beta_s_per_byte


def _ring(members: int, payload_bytes: float) -> tuple[float, float]:
    """Steps, and bytes that a rank sends (docs/transports.md, Algorithms over MPI)."""
    return 2.0 * (members - 1), 2.0 * payload_bytes * (members - 1) / members
