"""Leases and the keyed permutation behind them: golden values, no sample lost or duplicated."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import (
    Permutation,
    batches_of,
    epoch_of,
    leases_per_epoch,
    left_out_per_epoch,
    samples_of,
    total_leases,
)

from testing.examples import examples

GOLDEN_10 = [0, 4, 8, 6, 9, 2, 7, 3, 1, 5]
GOLDEN_LARGE = [857573, 620687, 113991, 488120, 428538, 121847]

plans = st.builds(
    DataPlan,
    samples=st.integers(1, 300),
    batch=st.integers(1, 40),
    accumulate=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**63),
    drop_last=st.booleans(),
)


def test_the_permutation_matches_golden_values() -> None:
    """A restored job must use the order that it was saved with.

    The order must not depend on the machine or the version.
    """
    assert Permutation(10, seed=0, epoch=0).range(0, 10) == GOLDEN_10
    assert Permutation(1_000_003, seed=7, epoch=2).range(500_000, 500_006) == GOLDEN_LARGE


@given(samples=st.integers(1, 2000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**31))
@settings(max_examples=examples(60), deadline=None)
def test_each_sample_has_one_position(samples: int, seed: int, epoch: int) -> None:
    order = Permutation(samples, seed, epoch).range(0, samples)
    assert sorted(order) == list(range(samples))


@given(samples=st.integers(2, 10**9), start=st.integers(0, 10**9), seed=st.integers(0, 99))
@settings(max_examples=examples(25), deadline=None)
def test_any_part_of_the_order_can_be_computed_alone(samples: int, start: int, seed: int) -> None:
    start %= samples
    part = Permutation(samples, seed, 3).range(start, min(start + 5, samples))
    alone = [
        Permutation(samples, seed, 3).range(at, at + 1)[0] for at in range(start, start + len(part))
    ]
    assert part == alone
    assert all(0 <= number < samples for number in part)


@pytest.mark.parametrize("samples", [5, 12])
def test_every_sample_comes_first_equally_often(samples: int) -> None:
    draws = 3000
    first = Counter(Permutation(samples, 1, epoch).range(0, 1)[0] for epoch in range(draws))
    expected = draws / samples
    chi_square = sum((first[number] - expected) ** 2 / expected for number in range(samples))
    assert chi_square < 3 * samples, first


def test_the_permutation_separates_neighboring_samples() -> None:
    order = Permutation(10_000, 0, 0).range(0, 10_000)
    steps = [abs(after - before) for before, after in pairwise(order)]
    assert sum(step < 100 for step in steps) < 0.03 * len(steps)  # A random order has 2 %.
    assert abs(sum(steps) / len(steps) - 3333) < 100


@given(plan=plans)
@settings(max_examples=examples(150), deadline=None)
def test_the_leases_of_an_epoch_contain_each_sample_at_most_once(plan: DataPlan) -> None:
    per_epoch = leases_per_epoch(plan)
    assert total_leases(plan) == per_epoch * plan.epochs
    for epoch in range(plan.epochs):
        leases = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        counts = Counter[int]()
        for lease in leases:
            batches = batches_of(plan, lease)
            assert epoch_of(plan, lease) == epoch
            assert sum(map(len, batches)) == samples_of(plan, lease) >= 1
            assert len(batches) <= plan.accumulate
            assert all(len(batch) == plan.batch for batch in batches[:-1])
            counts.update(number for batch in batches for number in batch)
        assert set(counts.values()) <= {1}
        whole = per_epoch * plan.batch * plan.accumulate if plan.drop_last else plan.samples
        assert len(counts) == whole


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    orders = {
        tuple(Permutation(50, seed, epoch).range(0, 50)) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


def test_a_self_fed_job_has_no_leases() -> None:
    assert leases_per_epoch(DataPlan()) == total_leases(DataPlan(epochs=3)) == 0


@given(plans, st.booleans())
def test_left_out_per_epoch_counts_the_samples_without_a_lease(
    plan: DataPlan, drop_last: bool
) -> None:
    plan = replace(plan, drop_last=drop_last)
    dealt = sum(samples_of(plan, lease) for lease in range(leases_per_epoch(plan)))
    assert left_out_per_epoch(plan) == plan.samples - dealt


def test_drop_last_leaves_out_26_of_250() -> None:
    assert left_out_per_epoch(DataPlan(samples=250, batch=32, drop_last=True)) == 26
    assert left_out_per_epoch(DataPlan(samples=250, batch=32)) == 0
    assert left_out_per_epoch(DataPlan(steps=9, drop_last=True)) == 0
