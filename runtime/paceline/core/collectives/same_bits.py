"""Does a library's own allreduce give every rank the same bits (R23)? Asked when a group is made.

Every rank reduces random data in a few sizes, since a library takes another algorithm for each, and
makes an integer of the bits of each sum. Least = greatest over the ranks: all have the same. The
greatest of `d` and of `~d` travel as one vote; it is reduced to one rank and broadcast, so that the
answer is the same everywhere though the allreduce in question may not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PROBE_BYTES: Final = (16 << 10, 256 << 10, 4 << 20)
"""Where libraries favour latency, are in between, and favour bandwidth."""
PROBE_NAMES: Final = ("16KiB", "256KiB", "4MiB")


def vote(digests: Sequence[int]) -> list[int]:
    """What one rank has found, one signed integer of 64 bits per size; the ranks' votes become one
    by taking the greatest of each entry."""
    return [*digests, *(~digest for digest in digests)]


def differing(greatest: Sequence[int]) -> tuple[str, ...]:
    """The sizes at which not all ranks have the same bits, from the greatest of all votes."""
    half = len(greatest) // 2
    most, least = greatest[:half], [~entry for entry in greatest[half:]]
    names = zip(PROBE_NAMES, most, least, strict=True)
    return tuple(name for name, high, low in names if high != low)
