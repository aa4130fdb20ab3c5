"""Who sends which part of a buffer to whom, so that every rank ends with the same sum (R23).

A *schedule* is the list of steps of one rank. A buffer is cut into `chunks` nearly equal parts; a
step names the parts that leave and the parts that come in, and whether what comes in is added or
replaces. A rank may start a step as soon as its own previous step is complete. Three algorithms,
for any number of ranks:

- ring: reduce-scatter and allgather round the ring; 2(P-1) steps, each rank moves 2S(P-1)/P bytes;
- recursive doubling: whole buffers between ranks whose distance doubles; log2(P) steps;
- halving-doubling (Rabenseifner): reduce-scatter between ranks whose distance doubles while what
  they exchange is halved, then allgather the same way back; 2 log2(P) steps, 2S(P-1)/P bytes.

The last two need a power of two: when P is none, some ranks hand their part to a neighbour first
and get the result last, two more steps. They pair the same ranks and add in the same order.

`fold` is the slow, obvious twin: it says in which order each chunk is summed, so that a test can
predict the result bit for bit.

Where what travels is shorter than what is summed, parts are rounded on their way (`Rounding`): what
leaves before it is complete, and the complete sum once, so that all ranks have the same bits. Each
rounding is made by one rank, or by several alike, of which one keeps what it took away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

RING: Final = "ring"
RECURSIVE_DOUBLING: Final = "recursive_doubling"
HALVING_DOUBLING: Final = "halving_doubling"
ALGORITHMS: Final = (RECURSIVE_DOUBLING, HALVING_DOUBLING, RING)

T = TypeVar("T")


class Rounding(IntEnum):
    """What becomes of a part where the type that travels is shorter than that of the sum."""

    EXACT = 0
    """It is of that type already."""
    ROUNDED = 1
    """It is rounded; another rank, which rounds the same, keeps what that takes away."""
    KEPT = 2
    """It is rounded, and what that takes away is kept here."""


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One exchange of one rank, of `width` neighbouring chunks; either half may be absent."""

    send_to: int | None = None
    send_chunk: int = 0
    recv_from: int | None = None
    recv_chunk: int = 0
    width: int = 1
    reduce: bool = False
    """What comes in is added to the own part; otherwise it replaces it."""
    sent: Rounding = Rounding.EXACT
    """Of the part that leaves, in place: this rank goes on with what the other one gets."""
    made: Rounding = Rounding.EXACT
    """Of the sum that the step makes."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """All steps of one rank, and into how many chunks they cut a buffer."""

    chunks: int
    steps: tuple[ScheduleStep, ...]


def schedule(algorithm: str, size: int, rank: int) -> Schedule:
    """The steps of `rank` among `size` ranks under the named algorithm."""
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
    """The ranks that `rank` exchanges messages with, ascending; the relation is symmetric."""
    found: set[int] = set()
    for algorithm in algorithms:
        for step in schedule(algorithm, size, rank).steps:
            found |= {peer for peer in (step.send_to, step.recv_from) if peer is not None}
    return tuple(sorted(found))


def bounds(numel: int, chunks: int) -> tuple[int, ...]:
    """Element offsets: chunk c is [bounds[c], bounds[c + 1]); sizes differ by at most one."""
    share, extra = divmod(numel, chunks)
    return tuple(c * share + min(c, extra) for c in range(chunks + 1))


def _ring(size: int, rank: int) -> tuple[ScheduleStep, ...]:
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
    # Now this rank holds the finished chunk rank + 1; the finished chunks go round once more.
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
    """The steps `middle` of a power of two of ranks, and how the others hang on to them.

    The first 2 x spare ranks pair up: the even one hands its part to the odd one, waits, and gets
    the result; the others, a power of two of them, take the places of `middle`.
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
    """At each level 2^level ranks have the same part; the first of them keeps what is rounded."""
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
    """The greatest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def _as_it_is(part: T, rank: int) -> T:  # noqa: ARG001
    return part


def fold(
    algorithm: str,
    parts: Sequence[T],
    chunk: int,
    add: Callable[[T, T], T],
    rounded: Callable[[T, int], T] = _as_it_is,
) -> T:
    """The sum of `parts` (one per rank) for one chunk, added in the order of the algorithm.

    Only the *pairing* of additions is fixed, not which operand is on the left: IEEE addition is
    commutative, and that is what makes recursive doubling give the same bits everywhere. It and
    halving-doubling pair alike, in every chunk.

    `rounded(part, rank)`: the part as it travels; `rank` keeps what that takes away. The two differ
    there: in recursive doubling both partners have to go on with what the other one gets.
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
    """Of this chunk, as far as places differ in the levels so far."""
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
