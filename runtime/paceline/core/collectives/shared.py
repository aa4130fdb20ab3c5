"""How ranks that share memory sum a buffer: the acts of each rank, and when it may go on.

Each rank has memory that only it writes and all others may read: a block with a *mark*, a *step*,
two *bounce buffers* and the description of its buffer, and perhaps the buffer itself. Nothing is
locked, so a rank that ends at any instant leaves nothing half-read:

- The step is a counter with one writer. A rank stores it after everything else that it has written
(release) and loads the others' steps before it reads their data (acquire). `BARRIER` means: store
the next step, and go on when every rank's step is as high.
- A rank that gives up clears its mark before it reuses its memory. A rank that has read checks all
marks before it stores its next step or returns the sum (`LOOK`). If one is cleared, the data that
it read may be anything, and it gives up too. So a rank that was stopped for an hour cannot come
back with a wrong sum or pass one on.

A buffer goes through three phases. First each rank shows it: in place if it lies in shared memory,
otherwise piece by piece through a bounce buffer. Then rank l sums slice l of all that is shown, in
member order, over its own part. Then every rank copies the other slices. A small buffer is summed
whole by each rank, which saves a barrier. The bounce buffers alternate: a rank that writes to one
has passed a barrier with all others since they read its previous content.

`reduction` gives the acts of a rank, `fold` the order of the additions. The loop in Python carries
out the acts one by one; the loop in C does the same. The property test splits them into single
loads and stores and tries all orders in which those of several ranks can happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import reduce
from typing import Final, TypeVar

BOUNCE_BYTES: Final = 1 << 20
"""Size of a bounce buffer in bytes: one piece of a buffer outside shared memory. It stays in the
caches."""
SMALL_BYTES: Final = 64 << 10
"""Largest buffer, in bytes, that each rank sums whole: a barrier takes longer than the additions.
"""
LINE_BYTES: Final = 64
"""Alignment of slices, in bytes: one cache line, so no two ranks write to the same line."""

T = TypeVar("T")


class What(Enum):
    """The kinds of acts."""

    SHOW = auto()
    """Describe the own buffer. Copy the bytes low..high into the next bounce buffer unless the
    buffer is shared in place."""
    BARRIER = auto()
    """Check all marks, store the next step, and wait until every rank has stored it."""
    SUM_ALL = auto()
    """Sum all of low..high into the own buffer."""
    SUM = auto()
    """Sum the own slice of low..high over the part that this rank shows."""
    CARRY = auto()
    """Sum the own slice with those of other machines, over another transport. For buffers in place
    this may go piece by piece, together with the sums inside the machine. After each piece the
    rank then publishes how far its slice is complete (release), and copies as far as others have
    published theirs (acquire)."""
    COPY = auto()
    """Copy the sums of all slices of low..high into the own buffer."""
    LOOK = auto()
    """Check that every rank is still in the group, so all data that was read is valid."""


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
    """Yield the acts of one rank that sum a buffer; they are the same on all ranks.

    Args:
        nbytes: Size of the buffer in bytes; above 0.
        in_place: Returns for each rank whether its buffer lies in shared memory. Called after the
            first barrier, when every rank has published it, and not at all for a small buffer
            (`is_small`).
        carried: True if slices are also summed with those of other machines.
        bounce_bytes: Size of a bounce buffer in bytes.
        small_bytes: Largest buffer that each rank sums whole, in bytes.

    Yields:
        The acts, in order.
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
        yield Act(What.BARRIER)  # after it the buffers belong to the callers again


def is_small(nbytes: int, *, carried: bool, small_bytes: int = SMALL_BYTES) -> bool:
    """Return True if each rank sums the whole buffer, through the bounce buffers."""
    return nbytes <= small_bytes and not carried


def slices(low: int, high: int, parts: int, line: int = LINE_BYTES) -> tuple[int, ...]:
    """Return where the slices of the bytes low..high begin.

    Args:
        low: First byte.
        high: End of the bytes, exclusive.
        parts: Number of slices, one for each rank.
        line: Alignment of the slices relative to `low`, in bytes.

    Returns:
        `parts` + 1 offsets: slice l is [at[l], at[l + 1]).
    """
    lines = -(-(high - low) // line)
    share, extra = divmod(lines, parts)
    return tuple(
        min(high, low + line * (part * share + min(part, extra))) for part in range(parts + 1)
    )


def fold(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Return the sum of `parts`, one for each rank of one machine, added in member order."""
    return reduce(add, parts)
