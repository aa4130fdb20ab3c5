"""Analysis of a job from the samples of its ranks: one clock, blame for late ranks, advice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.anatomy.dissect import Part
from paceline.core.anatomy.job import analyse, arrivals, known_rounds, latest_rounds
from paceline.core.anatomy.samples import (
    PodSamples,
    SilentPod,
)

from testing.anatomy_samples import ROUNDS, asked_later, pods, rank


def test_the_late_rank_is_blamed() -> None:
    job = analyse(pods())
    (blame,) = job.blame
    assert (blame.worker, blame.last) == ("2.0", ROUNDS)
    assert blame.per_step_s == pytest.approx(0.040)
    assert blame.blocked_s == pytest.approx(2 * ROUNDS * 0.040)
    assert job.parts[Part.BLOCKED] == pytest.approx(0.040 * 2 / 3)
    assert job.step_s == pytest.approx(0.1)


def test_advice_names_the_part_in_which_the_late_rank_is_slower() -> None:
    first = analyse(pods()).advice[0]
    assert first.what.endswith("mostly worker 2.0")
    assert "spends 70 ms of a step on backward, the others 30 ms" in first.change
    assert "Quorum of 2 would have saved 27 ms" in first.change


def test_a_slow_rank_is_found_by_its_own_time_even_if_nobody_waited() -> None:
    """In a partial mode the others go on without it, so no wait tells."""
    alone = [
        replace(pod, ranks=tuple(replace(own, rounds=()) for own in pod.ranks)) for pod in pods()
    ]
    job = analyse(alone)
    assert not job.blame
    (slow,) = job.slow
    assert (slow.worker, slow.host, slow.part) == ("2.0", "other", Part.BACKWARD)
    assert slow.own_s == pytest.approx(0.070)
    assert slow.others_s == pytest.approx(0.030)
    assert slow.more_s == pytest.approx(0.040)


def test_equal_ranks_and_a_rank_with_few_steps_are_not_slow() -> None:
    first, second, third = pods()
    assert not analyse([first, second]).slow
    (own,) = third.ranks
    new = replace(third, ranks=(replace(own, steps=own.steps[:2]),))
    assert not analyse([first, second, new]).slow


def test_a_single_long_step_makes_no_rank_slow() -> None:
    first, second, _ = pods()
    (own,) = second.ranks
    *most, last = own.steps
    hour = replace(
        last, announced_ns=last.announced_ns + 10**12, resumed_ns=last.resumed_ns + 10**12
    )
    assert not analyse([first, replace(second, ranks=(replace(own, steps=(*most, hour)),))]).slow


def test_a_job_without_late_ranks_gets_no_advice_about_them() -> None:
    job = analyse([PodSamples("job", 0, "here", (replace(rank(0), rounds=()),))])
    assert not job.blame
    assert not job.savings
    assert all("last rank" not in advice.what for advice in job.advice)


@pytest.mark.long
@given(st.integers(-900, 10**6))
def test_clock_shifts_of_hosts_do_not_change_the_analysis(shift_ms: int) -> None:
    shifted, plain = analyse(pods(shift_ms)), analyse(pods())
    assert arrivals(shifted.ranks) == arrivals(plain.ranks)
    assert shifted.savings == plain.savings
    assert shifted.parts == plain.parts
    assert known_rounds(shifted.ranks) == range(ROUNDS)


def test_a_missing_pod_removes_only_results_that_need_all_pods() -> None:
    """The late rank is still blamed by name."""
    known, silent = pods()[:2], [SilentPod("job-2-0", "no answer within 10 s")]
    job = analyse(known, silent)
    (blame,) = job.blame
    assert blame.worker == "2.0"
    assert blame.per_step_s == pytest.approx(0.040)
    assert not job.savings
    assert "would have saved" not in job.advice[0].change
    assert job.silent == tuple(silent)


def test_latest_rounds_are_those_that_most_ranks_know() -> None:
    first, second, third = pods()
    ranks = analyse([first, second, asked_later(third, 3)]).ranks
    assert known_rounds(ranks) == range(8)
    assert latest_rounds(ranks, 12) == range(5)
    assert latest_rounds(ranks, 2) == range(3, 5)
    assert latest_rounds((), 12) == range(0)


def test_a_rank_without_common_rounds_has_no_clock_and_no_savings() -> None:
    first, second, third = pods(shift_ms=500)
    job = analyse([first, second, asked_later(third, ROUNDS)])
    assert [rank.clock is None for rank in job.ranks] == [False, False, True]
    assert not job.savings
