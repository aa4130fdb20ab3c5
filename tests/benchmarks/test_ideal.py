"""Ideal rates for drawn step times: Full waits for the slowest, no mode loses a gradient."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ideal import rates

ranks_drawn = st.integers(1, 9)
seeds = st.integers(0, 10**6)


def times(seed: int) -> dict[tuple[int, int], float]:
    """Return random step times of nine ranks and 300 steps."""
    dice = random.Random(seed)
    return {(rank, step): dice.uniform(0.1, 1.0) for rank in range(9) for step in range(300)}


@given(ranks=ranks_drawn, seed=seeds)
def test_full_mode_takes_the_slowest_time_of_each_step(ranks: int, seed: int) -> None:
    drawn = times(seed)
    result = rates(lambda rank, step, _: drawn[rank, step], ranks=ranks, quorum=ranks, rounds=20)
    slowest = sum(max(drawn[rank, step] for rank in range(ranks)) for step in range(20))
    assert result.rounds_per_s == pytest.approx(20 / slowest)
    assert result.gradients_per_s == pytest.approx(20 * ranks / slowest)
    assert result.fresh == ranks


@given(ranks=ranks_drawn, seed=seeds, data=st.data())
def test_rounds_average_at_least_a_quorum_and_no_gradient_is_lost(
    ranks: int, seed: int, data: st.DataObject
) -> None:
    quorum, drawn = data.draw(st.integers(1, ranks)), times(seed)
    begun = [0] * ranks

    def step_s(rank: int, step: int, version: int) -> float:
        begun[rank] = step
        return drawn[rank, step]

    result = rates(step_s, ranks=ranks, quorum=quorum, rounds=20)
    seconds = 20 / result.rounds_per_s
    assert quorum <= result.fresh + 1e-9
    # All finished steps count: those that were started, less the last one of each rank.
    under_way = sum(begun) + ranks - result.gradients_per_s * seconds
    assert under_way == pytest.approx(ranks)


def test_equal_step_times_give_the_same_rate_in_every_mode() -> None:
    for quorum in (1, 3, 4):
        result = rates(lambda *_: 0.5, ranks=4, quorum=quorum, rounds=50)
        assert result.gradients_per_s == pytest.approx(8, rel=0.05)


def test_a_drawn_rank_starts_its_round_when_it_arrives() -> None:
    result = rates(lambda rank, *_: 1.0 + rank, ranks=2, quorum=1, rounds=400, drawn=True)
    assert 1 / 4 < result.rounds_per_s < 1
