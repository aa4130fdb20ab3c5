"""How ranks that share memory sum a buffer: what each does, and when it may go on.

Each rank has memory that it alone writes and all others may read: a block with a *mark*, a *step*,
two *bounce buffers* and what it says of its buffer, and perhaps the buffer itself. Nothing is
locked, so a rank that ends at any instant leaves nothing half-read:

- The step is a counter with one writer. It is stored after everything that the rank has written
  (release) and is looked at before anything is read (acquire). `BARRIER`: store the next step, go
  on when everybody's is as high.
- A rank that gives up wipes its mark first and reuses its memory then. A rank that has read looks
  at the marks before it stores its next step or hands out the sum (`LOOK`): if one is gone, what it
  has read may be anything, and it gives up too. So a rank that was stopped for an hour cannot come
  back with a wrong sum, and passes none on.

A buffer goes through three phases: it is shown, in place where it lies in shared memory and through
a bounce buffer piece by piece where it does not; rank l sums slice l of all that is shown, in
member order, over its own part; everybody copies the other slices. A small one is summed whole by
each rank, which saves a barrier. The bounce buffers take turns: who shows in one has met all others
since they have read what was in it before.

`reduction` is what a rank does, `fold` the order of the additions. The loop in Python carries out
the acts one by one; the one in C does the same. The property test takes them apart into single
loads and stores and goes through all orders in which those of several ranks can happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import reduce
from typing import Final, TypeVar

BOUNCE_BYTES: Final = 1 << 20
"""A piece of a buffer that does not lie in shared memory; it stays in the caches."""
SMALL_BYTES: Final = 64 << 10
"""Up to here each rank sums the whole: a barrier takes longer than the additions."""
LINE_BYTES: Final = 64
"""Slices begin on a cache line, so no two ranks write to the same one."""

T = TypeVar("T")


class What(Enum):
    SHOW = auto()
    """Say what the own buffer is; copy the bytes low..high into the next bounce buffer unless it is
    shared in place."""
    BARRIER = auto()
    """Look, store the next step, and wait until everybody has."""
    SUM_ALL = auto()
    """Sum all of low..high into the own buffer."""
    SUM = auto()
    """Sum the own slice of low..high over what this rank shows of it."""
    CARRY = auto()
    """Sum the own slice with those of other machines, by another transport. Of buffers in place
    this may go piece by piece, the sums inside included: then a rank says after each (release) how
    far its slice is complete, and copies as far as others say so of theirs (acquire)."""
    COPY = auto()
    """Copy the sums of all slices of low..high into the own buffer."""
    LOOK = auto()
    """Everybody is still in the group, so that all that was read is true."""


@dataclass(frozen=True, slots=True)
class Act:
    """One act of a rank, on the bytes low..high of the buffer."""

    what: What
    low: int = 0
    high: int = 0


def reduction(
    nbytes: int,
    in_place: Callable[[], Sequence[bool]],
    *,
    carried: bool = False,
    bounce_bytes: int = BOUNCE_BYTES,
    small_bytes: int = SMALL_BYTES,
) -> Iterator[Act]:
    """What one rank does to sum a buffer of `nbytes` > 0, alike on all ranks.

    `in_place`: for each rank, whether its buffer lies in shared memory; asked for after the first
    barrier, when everybody has said so. Of a small buffer nobody's counts (`is_small`).
    """
    small = is_small(nbytes, carried=carried, small_bytes=small_bytes)
    low, shared = 0, tuple[bool, ...]()
    while low < nbytes:
        high = min(nbytes, low + bounce_bytes)
        yield Act(What.SHOW, low, high)
        yield Act(What.BARRIER)
        if small:
            yield Act(What.SUM_ALL, low, high)
        else:
            shared = shared or tuple(in_place())
            if all(shared):
                high = nbytes
            yield Act(What.SUM, low, high)
            if carried:
                yield Act(What.CARRY, low, high)
            yield Act(What.BARRIER)
            yield Act(What.COPY, low, high)
        low = high
    yield Act(What.LOOK)
    if any(shared):
        yield Act(What.BARRIER)  # the buffers are the callers' again


def is_small(nbytes: int, *, carried: bool, small_bytes: int = SMALL_BYTES) -> bool:
    """Whether each rank sums the whole of it, through the bounce buffers."""
    return nbytes <= small_bytes and not carried


def slices(low: int, high: int, parts: int, line: int = LINE_BYTES) -> tuple[int, ...]:
    """Where the slices of the bytes low..high begin: slice l is [at[l], at[l + 1])."""
    lines = -(-(high - low) // line)
    share, extra = divmod(lines, parts)
    return tuple(
        min(high, low + line * (part * share + min(part, extra))) for part in range(parts + 1)
    )


def fold(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of `parts`, one per rank of one machine: in member order, in every slice."""
    return reduce(add, parts)
