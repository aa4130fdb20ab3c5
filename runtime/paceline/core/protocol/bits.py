"""Compact encodings of sets of ranks and of arrival times, for messages that name many ranks."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Final, TypeVar

T = TypeVar("T")

_TO_DIGITS: Final = bytes.maketrans(b"\0\1", b"01")
_FROM_DIGITS: Final = bytes.maketrans(b"01", b"\0\1")
_MANTISSA: Final = 12
"""Significant bits that are kept of an arrival time, which is then at most 0.05 % too small."""
OFFSET_MAX_US: Final = 4095 << 30
"""Largest arrival time that can be encoded, 50 days; larger ones are cut to it."""


def pack_bits(flags: bytearray) -> bytes:
    """Encode flags as a bit set, with the first flag in the lowest bit of the first byte.

    Args:
        flags: One byte for each rank, 0 or 1.

    Returns:
        One bit for each flag, padded to whole bytes; empty if no flag is set.
    """
    if 1 not in flags:
        return b""
    number = int(flags.translate(_TO_DIGITS)[::-1], 2)
    return number.to_bytes((len(flags) + 7) // 8, "little")


def chosen(bits: bytes, everybody: Sequence[T]) -> tuple[T, ...]:
    """Return the elements whose bit is set, in their order.

    Args:
        bits: Bit set made by `pack_bits`.
        everybody: Elements for which the bits stand.

    Returns:
        The chosen elements; none if `bits` is empty.

    Raises:
        ValueError: If the bit set has another length, or a bit is set for which there is no
            element.
    """
    if not bits:
        return ()
    if len(bits) == (len(everybody) + 7) // 8:
        digits = format(int.from_bytes(bits, "little"), f"0{len(everybody)}b")
        if len(digits) == len(everybody):
            return tuple(compress(everybody, digits[::-1].encode().translate(_FROM_DIGITS)))
    raise ValueError(f"a set of {8 * len(bits)} bits names some of {len(everybody)}")


def pack_offsets(offsets_us: Sequence[int]) -> bytes:
    """Encode times in 16 bits each, as floating-point numbers.

    Times up to 4 ms are exact. Codes are in the order of the times, so that comparing two codes
    compares the times. Times outside of 0 to `OFFSET_MAX_US` are cut to the nearest bound.

    Args:
        offsets_us: Times in microseconds.

    Returns:
        Two bytes for each time, little-endian.
    """
    if offsets_us and (min(offsets_us) < 0 or max(offsets_us) > OFFSET_MAX_US):
        offsets_us = [min(max(0, us), OFFSET_MAX_US) for us in offsets_us]
    exact, half = 1 << _MANTISSA, _MANTISSA - 1
    codes = array(
        "H",
        [
            us if us < exact else ((shift := us.bit_length() - _MANTISSA) << half) + (us >> shift)
            for us in offsets_us
        ],
    )
    if sys.byteorder == "big":
        codes.byteswap()
    return codes.tobytes()


def unpack_offsets(data: bytes) -> list[int]:
    """Decode times in microseconds that `pack_offsets` encoded."""
    codes = array("H", data)
    if sys.byteorder == "big":
        codes.byteswap()
    exact = 1 << _MANTISSA
    if not codes or max(codes) < exact:
        return codes.tolist()
    half, mask = _MANTISSA - 1, exact // 2 - 1
    return [c if c < exact else (exact // 2 + (c & mask)) << ((c >> half) - 1) for c in codes]


def rounded(offset_us: int) -> int:
    """Return a time as it is after encoding; all ranks, the starter too, use this value."""
    return unpack_offsets(pack_offsets((offset_us,)))[0]
