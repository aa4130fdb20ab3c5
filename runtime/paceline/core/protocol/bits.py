"""Sets of ranks and times of arrival in few bytes, for what names a thousand ranks at once."""

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
"""Bits of an offset that are kept: a time is at most 0.05 % too small."""
OFFSET_MAX_US: Final = 4095 << 30
"""50 days."""


def pack_bits(flags: bytearray) -> bytes:
    """One bit for each flag, of which each is 0 or 1; empty if none is set."""
    if 1 not in flags:
        return b""
    number = int(flags.translate(_TO_DIGITS)[::-1], 2)
    return number.to_bytes((len(flags) + 7) // 8, "little")


def chosen(bits: bytes, everybody: Sequence[T]) -> tuple[T, ...]:
    """Those whose bit is set. Raises ValueError for a bit that nobody has."""
    if not bits:
        return ()
    if len(bits) == (len(everybody) + 7) // 8:
        digits = format(int.from_bytes(bits, "little"), f"0{len(everybody)}b")
        if len(digits) == len(everybody):
            return tuple(compress(everybody, digits[::-1].encode().translate(_FROM_DIGITS)))
    raise ValueError(f"a set of {8 * len(bits)} bits names some of {len(everybody)}")


def pack_offsets(offsets_us: Sequence[int]) -> bytes:
    """Times in 16 bits each, as floating point numbers: up to 4 ms they are exact. In the order of
    the times, so that comparing what is packed compares the times."""
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
    codes = array("H", data)
    if sys.byteorder == "big":
        codes.byteswap()
    exact = 1 << _MANTISSA
    if not codes or max(codes) < exact:
        return codes.tolist()
    half, mask = _MANTISSA - 1, exact // 2 - 1
    return [c if c < exact else (exact // 2 + (c & mask)) << ((c >> half) - 1) for c in codes]


def rounded(offset_us: int) -> int:
    """What is left of a time that is packed; all ranks go on with this."""
    return unpack_offsets(pack_offsets((offset_us,)))[0]
