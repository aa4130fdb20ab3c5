"""Decodable gradients: a sum that tells exactly which batch is in it, and with which weight.

Each batch has a label of its own. Numbers are fractions, so no rounding hides an error.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from paceline.core.protocol.ids import MemberId


class Label(NamedTuple):
    """The `number`-th batch of one process."""

    member: MemberId
    number: int


FLAG = Label(MemberId(-1, 0, 0), 0)
"""In a segment of a round that somebody has given up."""

Sum = dict[Label, Fraction]
"""How many samples of which batch are in it."""


def add(into: Sum, other: Sum, factor: Fraction = Fraction(1)) -> None:
    for label, value in other.items():
        into[label] = into.get(label, Fraction(0)) + value * factor


def scaled(value: Sum, factor: Fraction) -> Sum:
    return {label: x * factor for label, x in value.items()}
