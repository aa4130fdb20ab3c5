"""Loads: draws have the requested mean, deviation and limits."""

from __future__ import annotations

import math
from statistics import NormalDist, mean, pstdev

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from paceline.core.loads import LOADS, Load, LoadError, shifted_ns

NORMAL = NormalDist()


def quantiles(load: Load, count: int = 4000) -> list[float]:
    """Return evenly spaced quantiles of a load; their moments are those of the load."""
    curve = load.curve()
    points = [(i + 0.5) / count * curve.kept for i in range(count)]
    return [
        load.min_ns + math.exp(curve.mu + curve.sigma * NORMAL.inv_cdf(point)) for point in points
    ]


@pytest.mark.parametrize("name", LOADS)
def test_draws_match_the_published_loads(name: str) -> None:
    load = LOADS[name]
    drawn = [load.draw_ns(seed=1, rank=r, step=s) for r in range(8) for s in range(1000)]
    assert all(load.min_ns <= each <= load.max_ns for each in drawn)
    assert mean(drawn) == pytest.approx(load.mean_ns, rel=0.02)
    assert pstdev(drawn) == pytest.approx(load.sd_ns, rel=0.1)


@pytest.mark.long
@given(
    share=st.floats(0.02, 0.95),
    part=st.floats(0.02, 0.9),
    least=st.integers(0, 10**9),
    width=st.integers(10**6, 10**11),
)
def test_mean_and_deviation_hold_despite_truncation(
    share: float, part: float, least: int, width: int
) -> None:
    """`share` is the position of the mean between the limits.

    `part` is the fraction of the largest deviation that a power law can have with that mean; a wide
    lognormal approaches a power law.
    """
    above = share * width
    exponent = share / (1 - share)
    sd = part * above / math.sqrt(exponent * (exponent + 2))
    load = Load(least + round(above), round(sd), least, least + width)
    try:
        values = quantiles(load)
    except LoadError:
        assume(False)
    assert max(values) <= load.max_ns * (1 + 1e-9)
    assert min(values) >= load.min_ns
    assert mean(values) == pytest.approx(load.mean_ns, abs=0.02 * load.sd_ns)
    assert pstdev(values) == pytest.approx(load.sd_ns, rel=0.05)


@given(load=st.sampled_from(list(LOADS.values())), rank=st.integers(0, 99), step=st.integers(0))
def test_a_draw_is_a_function_of_seed_rank_and_step(load: Load, rank: int, step: int) -> None:
    once = load.draw_ns(seed=0, rank=rank, step=step)
    assert load.min_ns <= once <= load.max_ns
    assert load.draw_ns(seed=0, rank=rank, step=step) == once
    others = {load.draw_ns(seed=s, rank=rank, step=step + n) for s in range(3) for n in range(3)}
    assert len(others) == 9


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (Load(10, 1, 10, 20), "mean is not between"),
        (Load(20, 1, 10, 20), "mean is not between"),
        (Load(15, 0, 10, 20), "sd is not above 0"),
        (Load(15 * 10**6, 4 * 10**6, 10**7, 2 * 10**7), "sd is too large: .* it is below 2.8"),
    ],
)
def test_an_impossible_load_is_rejected_with_its_problem(load: Load, problem: str) -> None:
    with pytest.raises(LoadError, match=problem):
        load.draw_ns(seed=0, rank=0, step=0)


@given(ranks=st.integers(1, 64), least=st.integers(0, 10**9), more=st.integers(0, 10**9))
def test_a_shift_rotates_the_delays_through_the_ranks(ranks: int, least: int, more: int) -> None:
    def delays(steps: range, of: range) -> list[int]:
        return sorted(
            shifted_ns(least, least + more, rank=rank, step=step, ranks=ranks)
            for step in steps
            for rank in of
        )

    one_step = delays(range(1), range(ranks))
    assert one_step[0] == least
    assert one_step[-1] == (least + more if ranks > 1 else least)
    assert delays(range(5, 5 + ranks), range(1)) == one_step
    assert delays(range(3, 4), range(ranks)) == one_step
