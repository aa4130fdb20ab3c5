"""Sums in shared memory are correct for every order of loads and stores, and for every death.

The acts of each rank are split into single steps on single cells. The tests explore all orders of
the steps of two or three ranks, with the death of a rank between any two of its steps, and with a
rank that aborts between any two and overwrites all memory that it has shared.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.collectives.shared import (
    BOUNCE_BYTES,
    LINE_BYTES,
    SMALL_BYTES,
    Act,
    What,
    fold,
    is_small,
    reduction,
    slices,
)

BOUNCE = 2
"""Cells of a bounce buffer in these tests; a larger buffer is sent in pieces."""
WASTE = -999_999
"""Value that a rank writes over everything after it has aborted."""

Step = tuple[str, int, int]
"""The name of an action, and two numbers."""


@dataclass(frozen=True)
class Job:
    """The reductions of a job: ranks, cells of each call, and which buffers are in place."""

    ranks: int
    cells: tuple[int, ...]
    in_place: tuple[bool, ...]
    small: int = 0
    carried: bool = False
    """True if sums also go to other machines: slices are passed on cell by cell and taken early.
    All buffers are then in place."""

    def part(self, rank: int, call: int, cell: int) -> int:
        """Return a rank's value of a cell, such that no other sum of parts is the same."""
        return int(10 ** (rank + 1)) * (call * 3 + cell + 1)

    def total(self, call: int, cell: int) -> int:
        return sum(self.part(rank, call, cell) for rank in range(self.ranks))


@cache
def steps(job: Job, rank: int) -> tuple[Step, ...]:
    """Return all single steps of one rank."""
    return tuple(_steps(job, rank))


def _steps(job: Job, rank: int) -> Iterator[Step]:
    use = 0
    for call, cells in enumerate(job.cells):
        small = is_small(cells, carried=job.carried, small_bytes=job.small)
        for cell in range(cells):
            yield "fill", call, cell
        low = 0
        acts = reduction(
            cells,
            lambda: job.in_place,
            carried=job.carried,
            bounce_bytes=BOUNCE,
            small_bytes=job.small,
        )
        for act in acts:
            if act.what is What.SHOW:
                use, low = use + 1, act.low
                yield "reset", 0, 0
                if small or not job.in_place[rank]:
                    for cell in range(act.low, act.high):
                        yield "show", (use % 2) * BOUNCE + cell - low, cell
            elif job.carried and act.what in (What.SUM, What.CARRY, What.COPY):
                yield from _carried(job, rank, act)
            elif act.what in (What.SUM, What.SUM_ALL, What.COPY):
                yield from _arithmetic(job, rank, act, use, low, small)
            elif act.what is What.BARRIER:
                yield "look", 0, 0
                yield "store", 0, 0
                yield "barrier", 0, 0
            else:
                assert act.what is What.LOOK
                yield "look", 0, 0
        for cell in range(cells):
            yield "check", call, cell


def _arithmetic(job: Job, rank: int, act: Act, use: int, low: int, small: bool) -> Iterator[Step]:
    def source(who: int, cell: int) -> int:
        """Return the index of a cell in a rank's memory: bounce buffers first, then its buffer."""
        if job.in_place[who] and not small:
            return 2 * BOUNCE + cell
        return (use % 2) * BOUNCE + cell - low

    at = slices(act.low, act.high, job.ranks, line=1)
    if act.what is What.COPY:
        for who in range(job.ranks):
            for cell in range(at[who], at[who + 1]):
                yield "read", who, source(who, cell)
                yield "keep", 2 * BOUNCE + cell, 0
        return
    whole = act.what is What.SUM_ALL
    own = range(act.low, act.high) if whole else range(at[rank], at[rank + 1])
    for cell in own:
        for who in range(job.ranks):
            yield "add" if who else "read", who, source(who, cell)
        yield "keep", 2 * BOUNCE + cell if whole else source(rank, cell), 0


def _carried(job: Job, rank: int, act: Act) -> Iterator[Step]:
    """Yield the steps of an act whose slices are announced cell by cell and taken at once."""
    at = slices(act.low, act.high, job.ranks, line=1)
    others = [
        (who, cell)
        for who in range(job.ranks)
        if who != rank
        for cell in range(at[who], at[who + 1])
    ]
    if act.what is What.COPY:
        for who, cell in others:
            yield "late", who, cell
    elif act.what is What.CARRY:
        for cell in range(at[rank], at[rank + 1]):
            for who in range(job.ranks):
                yield "add" if who else "read", who, 2 * BOUNCE + cell
            yield "keep", 2 * BOUNCE + cell, 0
            yield "tell", 0, cell + 1
            for who, other in others:
                yield "early", who, other


@dataclass(frozen=True)
class One:
    """The state of one rank at one moment."""

    at: int = 0
    step: int = 0
    mark: bool = True
    register: int = 0
    cells: tuple[int, ...] = ()
    carried: int = 0
    """Number of the first cell of its slice that is not complete yet."""
    taken: frozenset[int] = frozenset()
    ended: str = ""

    def put(self, cell: int, value: int) -> One:
        cells = (*self.cells[:cell], value, *self.cells[cell + 1 :])
        return replace(self, at=self.at + 1, cells=cells)


World = tuple[One, ...]


def after(job: Job, world: World, rank: int) -> World | None:
    """Return the world after the next step of a rank, or None if it waits; assert correct sums."""
    one = world[rank]
    what, a, b = steps(job, rank)[one.at]
    match what:
        case "fill":
            one = one.put(2 * BOUNCE + b, job.part(rank, a, b))
        case "show":
            one = one.put(a, one.cells[2 * BOUNCE + b])
        case "read":
            one = replace(one, at=one.at + 1, register=world[a].cells[b])
        case "add":
            one = replace(one, at=one.at + 1, register=one.register + world[a].cells[b])
        case "keep":
            one = one.put(a, one.register)
        case "look":
            gone = not all(other.mark for other in world)
            one = replace(one, at=one.at + 1, ended="gave up" if gone else "")
        case "reset":
            one = replace(one, at=one.at + 1, carried=0, taken=frozenset())
        case "tell":
            one = replace(one, at=one.at + 1, carried=b)
        case "early" | "late" if b not in one.taken and (what == "late" or world[a].carried > b):
            taken = one.taken | {b}
            one = replace(one.put(2 * BOUNCE + b, world[a].cells[2 * BOUNCE + b]), taken=taken)
        case "early" | "late":
            one = replace(one, at=one.at + 1)
        case "store":
            one = replace(one, at=one.at + 1, step=one.step + 1)
        case "barrier":
            if any(other.step < one.step for other in world):
                return None
            one = replace(one, at=one.at + 1)
        case _:
            assert one.cells[2 * BOUNCE + b] == job.total(a, b), (job, rank, a, b, world)
            one = replace(one, at=one.at + 1)
    if one.at == len(steps(job, rank)):
        one = replace(one, ended="done")
    return (*world[:rank], one, *world[rank + 1 :])


def explore(job: Job, *, kill: int | None = None, leave: int | None = None) -> set[tuple[str, ...]]:
    """Return how each rank ended, over all possible orders.

    Rank `kill` may die at any moment; rank `leave` may abort at any moment and overwrite its
    memory.
    """
    fresh = One(cells=(0,) * (2 * BOUNCE + max(job.cells)))
    todo: list[World] = [(fresh,) * job.ranks]
    visited, ends = set(todo), set()
    while todo:
        world = todo.pop()
        following: list[World] = []
        for rank, one in enumerate(world):
            if one.ended:
                continue
            next_world = after(job, world, rank)
            if next_world is not None:
                following.append(next_world)
            if rank == kill:
                following.append((*world[:rank], replace(one, ended="dead"), *world[rank + 1 :]))
            if rank == leave:
                left = replace(one, ended="left", mark=False, cells=(WASTE,) * len(one.cells))
                following.append((*world[:rank], left, *world[rank + 1 :]))
        if not following:
            ends.add(tuple(one.ended for one in world))
        for next_world in following:
            if next_world not in visited:
                visited.add(next_world)
                todo.append(next_world)
    return ends


TWO = [
    Job(2, (1, 1, 2), (False, False), small=2),
    Job(2, (3, 2), (False, False)),
    Job(2, (3, 3), (True, True)),
    Job(2, (3, 3), (True, False)),
    Job(2, (2, 1, 3), (True, True), small=1),
    Job(2, (4, 3), (True, True), carried=True),
]
THREE = [
    Job(3, (1, 1), (False, False, False), small=1),
    Job(3, (3,), (False, False, False)),
    Job(3, (3,), (True, True, True)),
    Job(3, (2,), (True, False, True)),
    Job(3, (3,), (True, True, True), carried=True),
]


@pytest.mark.parametrize("job", [*TWO, *THREE], ids=str)
def test_every_interleaving_gives_every_rank_the_sum(job: Job) -> None:
    assert explore(job) == {("done",) * job.ranks}


@pytest.mark.long
@pytest.mark.parametrize("job", [*TWO, *THREE], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_between_any_two_steps_gives_no_rank_a_wrong_sum(job: Job, victim: int) -> None:
    """A rank that has finished has the sum.

    The others wait until the peer connection reports the death.
    """
    ends = explore(job, kill=victim)
    assert {end[victim] for end in ends} == {"done", "dead"}
    for end in ends:
        if end[victim] == "done":
            assert set(end) == {"done"}


@pytest.mark.long
@pytest.mark.parametrize("job", [*TWO, *THREE], ids=str)
def test_a_rank_that_aborts_may_overwrite_its_shared_memory(job: Job) -> None:
    """A rank that continues after a long stop may find that another one has aborted.

    It then has no sum rather than a wrong one.
    """
    ends = explore(job, leave=1)
    assert {end[1] for end in ends} == {"done", "left"}
    assert any(end[1] == "left" and "done" in end for end in ends), "the last one may be through"


@given(
    low=st.integers(0, 5).map(lambda pieces: pieces * BOUNCE_BYTES),
    nbytes=st.integers(1, BOUNCE_BYTES),
    parts=st.integers(1, 20),
)
def test_slices_cover_a_piece_and_share_no_cache_line(low: int, nbytes: int, parts: int) -> None:
    at = slices(low, low + nbytes, parts)
    assert (at[0], at[-1]) == (low, low + nbytes)
    assert all(a <= b for a, b in itertools.pairwise(at))
    assert all(a % LINE_BYTES == 0 for a in at[:-1] if a < low + nbytes)
    widths = [b - a for a, b in itertools.pairwise(at)]
    assert max(widths) - min(widths) < 2 * LINE_BYTES


@given(nbytes=st.integers(1, 4 * BOUNCE_BYTES), carried=st.booleans(), shared=st.booleans())
def test_every_byte_is_summed_once(nbytes: int, carried: bool, shared: bool) -> None:
    acts = list(reduction(nbytes, lambda: [shared] * 2, carried=carried))
    sums = [(act.low, act.high) for act in acts if act.what in (What.SUM, What.SUM_ALL)]
    assert [0, *(high for _, high in sums)] == [*(low for low, _ in sums), nbytes]
    assert sum(act.what is What.CARRY for act in acts) == (len(sums) if carried else 0)
    barriers = sum(act.what is What.BARRIER for act in acts)
    if nbytes <= SMALL_BYTES and not carried:
        assert barriers == 1
    else:
        assert barriers == (3 if shared else 2 * len(sums))


def test_fold_adds_in_rank_order() -> None:
    parts: Sequence[float] = (1e16, 1.0, -1e16, 1.0)
    assert fold(parts, operator.add) == ((1e16 + 1.0) - 1e16) + 1.0
