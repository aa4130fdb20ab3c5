"""Shares: what one job and one namespace may take of a common budget, over any window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline_operator.core.shares import KEPT, Key, Rate, Shares

NAMESPACE = Rate(per_s=10.0, burst=40.0)
JOB = Rate(per_s=4.0, burst=12.0)
JOBS: tuple[Key, ...] = (("a", "1"), ("a", "2"), ("a", "3"), ("a", "4"), ("a", "5"), ("b", "1"))
AMOUNT_MAX = 12.0
STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 8.0),
        st.sampled_from(JOBS),
        st.floats(0.0, AMOUNT_MAX),
        st.booleans(),
    ),
    max_size=80,
)
EPSILON = 1e-6


def played(steps: list[tuple[float, Key, float, bool]]) -> list[tuple[float, Key, float]]:
    """Return (time, job, amount) of all that was granted; a reused name is the same job."""
    shares, now_s, taken = Shares(NAMESPACE), 0.0, []
    for pause_s, key, amount, looks in steps:
        now_s += pause_s
        if looks:
            shares._drop_full(now_s)
        if shares.take(key, JOB, amount, now_s) == 0.0:
            taken.append((now_s, key, amount))
    return taken


@pytest.mark.long
@given(STEPS)
def test_over_any_window_no_job_and_no_namespace_gets_more_than_its_share(
    steps: list[tuple[float, Key, float, bool]],
) -> None:
    taken = played(steps)
    for first, (since_s, _, _) in enumerate(taken):
        jobs: dict[Key, float] = {}
        namespaces: dict[str, float] = {}
        for at_s, key, amount in taken[first:]:
            jobs[key] = jobs.get(key, 0.0) + amount
            namespaces[key[0]] = namespaces.get(key[0], 0.0) + amount
            span_s = at_s - since_s
            assert jobs[key] <= JOB.burst + JOB.per_s * span_s + EPSILON
            assert namespaces[key[0]] <= NAMESPACE.burst + NAMESPACE.per_s * span_s + EPSILON


@pytest.mark.long
@given(STEPS)
def test_a_job_within_its_rate_is_not_refused_because_of_another_namespace(
    steps: list[tuple[float, Key, float, bool]],
) -> None:
    """Jobs of the other namespace may ask for any amount."""
    shares, now_s, asked_s = Shares(NAMESPACE), 0.0, 0.0
    good = ("good", "job")
    for pause_s, key, amount, _ in steps:
        now_s += pause_s
        for _ in range(20):
            shares.take(key, JOB, amount, now_s)
        shares.spend(key, JOB, 1000.0, now_s)
        due = (now_s - asked_s) * JOB.per_s
        if due:
            asked_s = now_s
            assert shares.take(good, JOB, min(due, JOB.burst), now_s) == 0.0


@pytest.mark.long
@given(STEPS)
def test_a_refused_amount_is_granted_after_the_returned_wait(
    steps: list[tuple[float, Key, float, bool]],
) -> None:
    shares, now_s = Shares(NAMESPACE), 0.0
    for pause_s, key, amount, _ in steps:
        now_s += pause_s
        wait_s = shares.take(key, JOB, amount, now_s)
        if wait_s:
            assert wait_s <= NAMESPACE.burst / NAMESPACE.per_s + EPSILON
            assert shares.take(key, JOB, amount, now_s + wait_s + EPSILON) == 0.0
            now_s += wait_s + EPSILON


def test_many_small_jobs_together_get_the_burst_of_their_namespace() -> None:
    shares = Shares(NAMESPACE)
    granted = sum(shares.take(("a", str(n)), JOB, 1.0, 0.0) == 0.0 for n in range(1000))
    assert granted == NAMESPACE.burst
    assert shares.take(("b", "1"), JOB, JOB.burst, 0.0) == 0.0, "another one has its own"


def test_the_cost_of_a_decision_is_paid_before_the_next_one() -> None:
    shares, key = Shares(NAMESPACE), ("a", "1")
    shares.spend(key, JOB, JOB.burst + 2 * JOB.per_s, 0.0)
    assert shares.take(key, JOB, 0.0, 0.0) == pytest.approx(2.0)
    assert shares.take(key, JOB, 0.0, 2.0) == 0.0


def test_a_full_bucket_grants_more_than_a_burst_as_a_debt() -> None:
    shares, key = Shares(NAMESPACE), ("a", "1")
    assert shares.take(key, JOB, 3 * JOB.burst, 0.0) == 0.0
    assert shares.take(key, JOB, 1.0, 0.0) > 2 * JOB.burst / JOB.per_s


def test_a_job_that_grows_gets_a_larger_share_and_no_second_burst() -> None:
    shares, key = Shares(NAMESPACE), ("a", "1")
    assert shares.take(key, JOB, JOB.burst, 0.0) == 0.0
    large = Rate(per_s=2 * JOB.per_s, burst=2 * JOB.burst)
    assert shares.take(key, large, 1.0, 0.0) > 0.0
    assert shares.take(key, large, 2 * JOB.per_s, 1.0) == 0.0, "half of it from before"


def test_full_buckets_of_inactive_jobs_are_dropped() -> None:
    shares = Shares(NAMESPACE)
    for n in range(20 * KEPT):
        shares.take((f"n{n}", "job"), JOB, 1.0, float(n))
    assert len(shares.jobs) + len(shares.namespaces) <= 3 * KEPT
