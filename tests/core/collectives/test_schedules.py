"""Schedules: every rank ends with the sum of all parts, paired as in `fold`, for any size.

A small in-memory network moves the messages and delivers them in any order between pairs, so a
schedule that deadlocks or matches a wrong part cannot pass by luck.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.collectives.schedules import (
    ALGORITHMS,
    HALVING_DOUBLING,
    RECURSIVE_DOUBLING,
    RING,
    Rounding,
    Schedule,
    bounds,
    fold,
    partners,
    schedule,
)

Term = frozenset[object]
"""A sum as the unordered pair of its operands, so equal terms have equal bits."""


def add(left: Term, right: Term) -> Term:
    return frozenset([left, right])


def leaf(rank: int, chunk: int) -> Term:
    return frozenset([f"{rank}.{chunk}"])


def rounded(term: Term) -> Term:
    return term if "rounded" in term else frozenset(["rounded", term])


Kept = Counter[tuple[int, int, Term]]
"""Counts by (rank, chunk, part) the ranks that keep the rounding residual of this part."""


def run(plans: list[Schedule], order: list[int], kept: Kept | None = None) -> list[list[Term]]:
    """Return every rank's chunks after all messages are delivered.

    `order` gives the order in which ranks take turns. If `kept` is given, messages are rounded and
    the residuals are counted in it.
    """
    size = len(plans)

    def round_part(rank: int, low: int, width: int, how: Rounding) -> None:
        for chunk in range(low, low + width) if kept is not None else ():
            term = chunks[rank][chunk]
            assert kept is not None
            assert how is not Rounding.EXACT or "rounded" in term
            kept[rank, chunk, term] += how is Rounding.KEPT
            chunks[rank][chunk] = rounded(term)

    chunks = [[leaf(rank, c) for c in range(plans[rank].chunks)] for rank in range(size)]
    wires: dict[tuple[int, int], deque[tuple[Term, ...]]] = defaultdict(deque)
    at = [0] * size
    sent = [False] * size
    turns = deque(order)
    idle = 0
    while any(at[rank] < len(plans[rank].steps) for rank in range(size)):
        rank = turns[0]
        turns.rotate(-1)
        idle += 1
        assert idle <= len(order), f"nobody can go on: steps {at}"
        if at[rank] == len(plans[rank].steps):
            continue
        step = plans[rank].steps[at[rank]]
        if not sent[rank] and step.send_to is not None:
            low = step.send_chunk
            round_part(rank, low, step.width, step.sent)
            wires[rank, step.send_to].append(tuple(chunks[rank][low : low + step.width]))
            idle = 0
        sent[rank] = True
        if step.recv_from is not None:
            wire = wires[step.recv_from, rank]
            if not wire:
                continue
            came = wire.popleft()
            assert len(came) == step.width, "a message longer or shorter than its place"
            for chunk, term in enumerate(came, start=step.recv_chunk):
                own = chunks[rank][chunk]
                chunks[rank][chunk] = add(own, term) if step.reduce else term
            if step.made is not Rounding.EXACT:
                round_part(rank, step.recv_chunk, step.width, step.made)
        at[rank] += 1
        sent[rank] = False
        idle = 0
    assert not any(wires.values()), "a message nobody receives"
    return chunks


@given(
    algorithm=st.sampled_from(ALGORITHMS),
    size=st.integers(1, 17),
    data=st.data(),
)
def test_every_rank_ends_with_the_sum_in_the_order_of_fold(
    algorithm: str, size: int, data: st.DataObject
) -> None:
    plans = [schedule(algorithm, size, rank) for rank in range(size)]
    order = data.draw(st.permutations(range(size)))
    chunks = run(plans, order)
    for chunk in range(plans[0].chunks):
        want = fold(algorithm, [leaf(rank, chunk) for rank in range(size)], chunk, add)
        assert [chunks[rank][chunk] for rank in range(size)] == [want] * size


@pytest.mark.long
@given(algorithm=st.sampled_from(ALGORITHMS), size=st.integers(2, 17), data=st.data())
def test_messages_are_rounded_as_in_fold_and_each_residual_is_kept_once(
    algorithm: str, size: int, data: st.DataObject
) -> None:
    plans = [schedule(algorithm, size, rank) for rank in range(size)]
    kept: Kept = Counter()
    chunks = run(plans, data.draw(st.permutations(range(size))), kept)
    want: Kept = Counter()
    for chunk in range(plans[0].chunks):

        def note(term: Term, rank: int, chunk: int = chunk) -> Term:
            want[rank, chunk, term] += 1
            return rounded(term)

        parts = [leaf(rank, chunk) for rank in range(size)]
        total = fold(algorithm, parts, chunk, add, note)
        assert "rounded" in total
        assert [chunks[rank][chunk] for rank in range(size)] == [total] * size
    assert +kept == want
    assert set(want.values()) == {1}


@pytest.mark.parametrize("size", range(1, 18))
def test_fold_adds_every_part_once(size: int) -> None:
    for algorithm in ALGORITHMS:
        for chunk in range(schedule(algorithm, size, 0).chunks):
            total = fold(algorithm, [1 << rank for rank in range(size)], chunk, int.__add__)
            assert total == (1 << size) - 1


@pytest.mark.parametrize("size", range(2, 18))
def test_partners_are_mutual_and_few_per_rank(size: int) -> None:
    mine = [partners(ALGORITHMS, size, rank) for rank in range(size)]
    for rank in range(size):
        assert rank not in mine[rank]
        assert all(rank in mine[other] for other in mine[rank])
        # Two neighbors in the ring, one partner per doubling, one to fold with.
        assert len(mine[rank]) <= 2 + size.bit_length() + 1


def test_schedules_have_the_expected_numbers_of_steps() -> None:
    assert len(schedule(RING, 8, 3).steps) == 14
    assert len(schedule(RECURSIVE_DOUBLING, 8, 3).steps) == 3
    assert [len(schedule(RECURSIVE_DOUBLING, 5, rank).steps) for rank in range(5)] == [
        2,
        4,
        2,
        2,
        2,
    ]


@pytest.mark.parametrize(("size", "power"), [(2, 2), (3, 2), (4, 4), (6, 4), (8, 8), (13, 8)])
def test_halving_doubling_moves_as_little_as_the_ring(size: int, power: int) -> None:
    """Ranks that halve move 2 (P-1)/P of the buffer, P being the largest power of two."""
    for rank in range(size):
        plan = schedule(HALVING_DOUBLING, size, rank)
        assert plan.chunks == power
        both = [s for s in plan.steps if s.send_to is not None and s.recv_from is not None]
        hung_on = len(plan.steps) - len(both)
        assert (len(both), hung_on) in {(2 * power.bit_length() - 2, 0), (0, 2)} | (
            {(2 * power.bit_length() - 2, 2)} if size > power else set()
        )
        assert sum(step.width for step in both) in (0, 2 * (power - 1))


@pytest.mark.parametrize("size", range(1, 18))
def test_halving_doubling_adds_in_the_order_of_recursive_doubling(size: int) -> None:
    for chunk in range(schedule(HALVING_DOUBLING, size, 0).chunks):
        parts = [leaf(rank, chunk) for rank in range(size)]
        both = [fold(name, parts, chunk, add) for name in (HALVING_DOUBLING, RECURSIVE_DOUBLING)]
        assert both[0] == both[1]


def test_halving_doubling_of_four_ranks_matches_the_golden_schedule() -> None:
    """Rank 2 reduces the first half with rank 3's part, then its second quarter with rank 0's.

    Then it gathers in the reverse order.
    """
    steps = schedule(HALVING_DOUBLING, 4, 2).steps
    assert [(s.send_to, s.send_chunk, s.recv_chunk, s.width, s.reduce) for s in steps] == [
        (3, 2, 0, 2, True),
        (0, 0, 1, 1, True),
        (0, 1, 0, 1, False),
        (3, 0, 2, 2, False),
    ]


def test_recursive_doubling_of_three_ranks_matches_the_golden_schedule() -> None:
    """Rank 0 sends its part to 1, ranks 1 and 2 double, and 1 returns the result to 0."""
    text = [
        [(s.send_to, s.recv_from, s.reduce) for s in schedule(RECURSIVE_DOUBLING, 3, rank).steps]
        for rank in range(3)
    ]
    assert text == [
        [(1, None, False), (None, 1, False)],
        [(None, 0, True), (2, 2, True), (0, None, False)],
        [(1, 1, True)],
    ]


def test_the_error_for_an_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'tree'.*recursive_doubling, halving_doubling, ring"):
        schedule("tree", 2, 0)


@given(numel=st.integers(0, 1000), chunks=st.integers(1, 40))
def test_bounds_cover_everything_in_equal_shares(numel: int, chunks: int) -> None:
    at = bounds(numel, chunks)
    sizes = [high - low for low, high in pairwise(at)]
    assert (at[0], at[-1], len(sizes)) == (0, numel, chunks)
    assert max(sizes) - min(sizes) <= 1
