"""Check that a library's own allreduce gives every rank the same bits (R23).

The check runs when a group is formed. Every rank reduces random data in a few sizes, since a
library uses another algorithm for each, and computes an integer digest of the bits of each sum. All
ranks have the same bits if the least digest equals the greatest. The maxima of `d` and of `~d` give
both, so one vote is enough. The votes are reduced to one rank and broadcast: the answer is then the
same on all ranks although the allreduce under test may not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PROBE_BYTES: Final = (16 << 10, 256 << 10, 4 << 20)
"""Sizes to test: where libraries optimize for latency, in between, and for bandwidth."""
PROBE_NAMES: Final = ("16KiB", "256KiB", "4MiB")
"""Names of these sizes, for users."""


def vote(digests: Sequence[int]) -> list[int]:
    """Return the vote of one rank.

    The votes of all ranks are combined by the maximum of each entry.

    Args:
        digests: One signed 64-bit integer for each probe size.

    Returns:
        The digests, followed by their complements.
    """
    return [*digests, *(~digest for digest in digests)]


def differing(greatest: Sequence[int]) -> tuple[str, ...]:
    """Return the sizes at which ranks have different bits.

    Args:
        greatest: The votes of all ranks, combined by the maximum of each entry.

    Returns:
        Names of the sizes, smallest first.
    """
    half = len(greatest) // 2
    most, least = greatest[:half], [~entry for entry in greatest[half:]]
    names = zip(PROBE_NAMES, most, least, strict=True)
    return tuple(name for name, high, low in names if high != low)
