"""Decodable gradients: a sum shows exactly which batches are in it, and with which weights.

Each batch has its own label. The numbers are exact, so rounding hides no error.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from paceline_api.ids import MemberId


class Label(NamedTuple):
    """Identity of the `number`-th batch of one process."""

    member: MemberId
    number: int


FLAG = Label(MemberId(-1, 0, 0), 0)
"""Label in a segment of a round that some rank has given up."""

Exact = int | Fraction
"""A number without rounding. An integer costs a fifth of a fraction."""
Sum = dict[Label, Exact]
"""Batch -> number of its samples in the sum."""


def exact(value: float | Fraction) -> Exact:
    """Return the same number, as an integer if it is one."""
    whole = int(value)
    return whole if whole == value else Fraction(value)


def add(into: Sum, other: Sum, factor: Exact = 1) -> None:
    """Add `factor` times another sum in place."""
    for label, value in other.items():
        into[label] = into.get(label, 0) + value * factor


def scaled(value: Sum, factor: Exact) -> Sum:
    """Return the sum times `factor`."""
    return {label: x * factor for label, x in value.items()}
