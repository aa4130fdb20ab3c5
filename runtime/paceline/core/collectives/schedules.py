"""Schedules of an allreduce: which rank sends which part of a buffer to whom (R23).

Every rank ends with the same sum. A *schedule* is the list of steps of one rank. A buffer is cut
into `chunks` nearly equal parts. A step names the parts that are sent and the parts that are
received, and says whether the received parts are added or replace the own ones. A rank may start a
step as soon as its own previous step is complete. There are three algorithms, for any number of
ranks:

- ring: reduce-scatter and allgather round the ring; 2(P-1) steps, each rank moves 2S(P-1)/P bytes;
- recursive doubling: whole buffers between ranks whose distance doubles; log2(P) steps;
- halving-doubling (Rabenseifner): reduce-scatter between ranks whose distance doubles while the
exchanged part halves, then allgather the same way back; 2 log2(P) steps, 2S(P-1)/P bytes.

The last two need a power of two. If P is not one, some ranks first hand their part to a neighbor
and get the result at the end, which takes two more steps. Both algorithms pair the same ranks and
add in the same order.

`fold` is the slow, obvious twin for tests: it says in which order each chunk is summed, so a test
can predict the result bit for bit.

If the type that travels is shorter than the type of the sum, parts are rounded on their way
(`Rounding`): a part is rounded before it is sent, and the complete sum is rounded once, so that all
ranks have the same bits. Each rounding is done by one rank, or identically by several ranks, one of
which keeps the rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

RING: Final = "ring"
"""Name of the ring algorithm."""
RECURSIVE_DOUBLING: Final = "recursive_doubling"
"""Name of the recursive doubling algorithm."""
HALVING_DOUBLING: Final = "halving_doubling"
"""Name of the halving-doubling algorithm."""
ALGORITHMS: Final = (RECURSIVE_DOUBLING, HALVING_DOUBLING, RING)

T = TypeVar("T")


class Rounding(IntEnum):
    """How a part is treated if the type that travels is shorter than that of the sum."""

    EXACT = 0
    """The part is not rounded: it already has the shorter type."""
    ROUNDED = 1
    """The part is rounded. Another rank, which rounds the same part, keeps the rounding error."""
    KEPT = 2
    """The part is rounded, and this rank keeps the rounding error."""


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One exchange of one rank, of `width` neighboring chunks; either half may be absent."""

    send_to: int | None = None
    """Rank to send to; None if the step only receives."""
    send_chunk: int = 0
    """First chunk that is sent."""
    recv_from: int | None = None
    """Rank to receive from; None if the step only sends."""
    recv_chunk: int = 0
    """First chunk that is received."""
    width: int = 1
    """Number of chunks that are sent and received."""
    reduce: bool = False
    """True if the received part is added to the own part; otherwise it replaces it."""
    sent: Rounding = Rounding.EXACT
    """Rounding of the part that is sent. It happens in place: this rank continues with what the
    receiver gets."""
    made: Rounding = Rounding.EXACT
    """Rounding of the sum that the step computes."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """All steps of one rank, and the number of chunks into which they cut a buffer."""

    chunks: int
    steps: tuple[ScheduleStep, ...]


def schedule(algorithm: str, size: int, rank: int) -> Schedule:
    """Return the steps of one rank under an algorithm.

    Args:
        algorithm: One of ALGORITHMS.
        size: Number of ranks, at least 1.
        rank: The rank, below `size`.

    Returns:
        The schedule; without steps if `size` is 1.

    Raises:
        ValueError: There is no algorithm of that name.
    """
    assert 0 <= rank < size, (rank, size)
    if size == 1:
        return Schedule(1, ())
    if algorithm == RING:
        return Schedule(size, _ring(size, rank))
    if algorithm == RECURSIVE_DOUBLING:
        return Schedule(1, _folded(size, rank, 1, _recursive_doubling))
    if algorithm == HALVING_DOUBLING:
        power = _power(size)
        return Schedule(power, _folded(size, rank, power, _halving_doubling))
    raise ValueError(f"no algorithm named {algorithm!r}; there are {', '.join(ALGORITHMS)}")


def partners(algorithms: Sequence[str], size: int, rank: int) -> tuple[int, ...]:
    """Return the ranks that `rank` exchanges messages with; the relation is symmetric.

    Args:
        algorithms: Algorithms that may be used.
        size: Number of ranks.
        rank: The rank, below `size`.

    Returns:
        The other ranks, ascending.
    """
    peers: set[int] = set()
    for algorithm in algorithms:
        for step in schedule(algorithm, size, rank).steps:
            peers |= {peer for peer in (step.send_to, step.recv_from) if peer is not None}
    return tuple(sorted(peers))


def bounds(numel: int, chunks: int) -> tuple[int, ...]:
    """Return the offsets at which a buffer is cut into chunks whose sizes differ by at most one.

    Args:
        numel: Number of elements of the buffer.
        chunks: Number of chunks, at least 1.

    Returns:
        `chunks` + 1 offsets in elements: chunk c is [bounds[c], bounds[c + 1]).
    """
    share, extra = divmod(numel, chunks)
    return tuple(c * share + min(c, extra) for c in range(chunks + 1))


def _ring(size: int, rank: int) -> tuple[ScheduleStep, ...]:
    """Return the steps of `rank` on a ring."""
    right, left = (rank + 1) % size, (rank - 1) % size
    steps = [
        ScheduleStep(
            right,
            (rank - s) % size,
            left,
            (rank - s - 1) % size,
            reduce=True,
            sent=Rounding.KEPT,
            made=Rounding.KEPT if s == size - 2 else Rounding.EXACT,
        )
        for s in range(size - 1)
    ]
    # Now this rank has the complete sum of chunk rank + 1. The complete chunks go round once more.
    steps += [
        ScheduleStep(right, (rank + 1 - s) % size, left, (rank - s) % size) for s in range(size - 1)
    ]
    return tuple(steps)


def _folded(
    size: int,
    rank: int,
    chunks: int,
    middle: Callable[[int, int, Callable[[int], int]], list[ScheduleStep]],
) -> tuple[ScheduleStep, ...]:
    """Extend the steps `middle` of a power of two of ranks to any number of ranks.

    The first 2 x spare ranks pair up. The even rank of a pair hands its part to the odd one, waits
    and gets the result. The remaining ranks, a power of two of them, take the places of `middle`.

    Args:
        size: Number of ranks.
        rank: The rank, below `size`.
        chunks: Number of chunks of the buffer.
        middle: Returns the steps of a place, given the power of two, the place and a function from
            place to rank.

    Returns:
        The steps of `rank`.
    """
    power = _power(size)
    spare = size - power
    if rank < 2 * spare and rank % 2 == 0:
        return (
            ScheduleStep(send_to=rank + 1, width=chunks, sent=Rounding.KEPT),
            ScheduleStep(recv_from=rank + 1, width=chunks),
        )
    odd = rank < 2 * spare
    place = rank // 2 if odd else rank - spare
    steps = middle(power, place, lambda at: 2 * at + 1 if at < spare else at + spare)
    if odd:
        steps.insert(0, ScheduleStep(recv_from=rank - 1, width=chunks, reduce=True))
        steps.append(ScheduleStep(send_to=rank - 1, width=chunks))
    return tuple(steps)


def _recursive_doubling(
    power: int, place: int, rank_at: Callable[[int], int]
) -> list[ScheduleStep]:
    """Return the steps of one place under recursive doubling.

    At each level 2^level ranks have the same part; the first of them keeps the rounding error.

    Args:
        power: Number of places, a power of two.
        place: The place, below `power`.
        rank_at: Maps a place to its rank.

    Returns:
        The steps.
    """
    levels = power.bit_length() - 1
    steps = []
    for level in range(levels):
        other = rank_at(place ^ (1 << level))
        sent = Rounding.ROUNDED if place % (1 << level) else Rounding.KEPT
        made = Rounding.EXACT
        if level == levels - 1:
            made = Rounding.ROUNDED if place else Rounding.KEPT
        steps.append(ScheduleStep(other, 0, other, 0, 1, reduce=True, sent=sent, made=made))
    return steps


def _halving_doubling(power: int, place: int, rank_at: Callable[[int], int]) -> list[ScheduleStep]:
    """Return the steps of one place under halving-doubling."""
    halving: list[ScheduleStep] = []
    doubling: list[ScheduleStep] = []
    low, width = 0, power
    for level in range(power.bit_length() - 1):
        other = rank_at(place ^ (1 << level))
        width //= 2
        keep, give = low, low + width
        if place >> level & 1:
            keep, give = give, keep
        made = Rounding.KEPT if width == 1 else Rounding.EXACT
        halving.append(
            ScheduleStep(
                other, give, other, keep, width, reduce=True, sent=Rounding.KEPT, made=made
            )
        )
        doubling.append(ScheduleStep(other, keep, other, give, width))
        low = keep
    return halving + doubling[::-1]


def _power(size: int) -> int:
    """Return the greatest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def _as_it_is(part: T, rank: int) -> T:  # noqa: ARG001
    """Return the part unchanged: no rounding."""
    return part


def fold(
    algorithm: str,
    parts: Sequence[T],
    chunk: int,
    add: Callable[[T, T], T],
    rounded: Callable[[T, int], T] = _as_it_is,
) -> T:
    """Return the sum of one chunk, added in the order of the algorithm.

    Only the *pairing* of additions is fixed, not which operand is on the left: IEEE addition is
    commutative, which is why recursive doubling gives the same bits on all ranks. Recursive
    doubling and halving-doubling pair alike, in every chunk. They differ in the rounding: in
    recursive doubling both partners have to continue with what the other one gets.

    Args:
        algorithm: One of ALGORITHMS.
        parts: The contribution of each rank, in rank order.
        chunk: Number of the chunk.
        add: Adds two parts.
        rounded: Called with a part and a rank. Returns the part as it travels; that rank keeps the
            rounding error.

    Returns:
        The sum, as all ranks have it.
    """
    size = len(parts)
    if size == 1:
        return parts[0]
    if algorithm == RING:
        total = parts[chunk % size]
        for hop in range(1, size):
            total = add(rounded(total, (chunk + hop - 1) % size), parts[(chunk + hop) % size])
        return rounded(total, (chunk - 1) % size)
    assert algorithm in (RECURSIVE_DOUBLING, HALVING_DOUBLING), algorithm
    power = _power(size)
    spare, levels = size - power, power.bit_length() - 1
    level = [add(rounded(parts[2 * i], 2 * i), parts[2 * i + 1]) for i in range(spare)]
    level += parts[2 * spare :]
    owner = 0
    """Place that owns this chunk, as far as the levels so far distinguish places."""
    for depth in range(levels):

        def sent(group: int, part: T, below: int = owner, depth: int = depth) -> T:
            place = (group << depth) + below
            return rounded(part, 2 * place + 1 if place < spare else place + spare)

        upper = chunk >> (levels - 1 - depth) & 1 if algorithm == HALVING_DOUBLING else 0
        made = []
        for group in range(0, len(level), 2):
            if algorithm == RECURSIVE_DOUBLING:
                made.append(add(sent(group, level[group]), sent(group + 1, level[group + 1])))
            else:
                other = group + 1 - upper
                made.append(add(level[group + upper], sent(other, level[other])))
        level = made
        owner += upper << depth
    return rounded(level[0], 2 * owner + 1 if owner < spare else owner + spare)
