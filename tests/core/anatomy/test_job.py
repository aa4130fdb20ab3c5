"""A job from the samples of its ranks: one clock, the late rank is blamed, advice follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.anatomy.dissect import Part
from paceline.core.anatomy.job import analyse, arrivals, known_rounds, latest_rounds
from paceline.core.anatomy.samples import (
    PodSamples,
    RankSamples,
    RoundSample,
    SilentPod,
    StepSample,
)

from tests.core.anatomy.test_dissect import MS, segment

LATE_MS = 40
ROUNDS = 5


def rank(slot: int, late_ms: int = 0, shift_ms: int = 0) -> RankSamples:
    """Steps of 100 ms: 30 ms of backward, the late rank more; a sum of 10 ms from 80 ms on."""
    steps, rounds = [], []
    for number in range(ROUNDS):
        at = 1000 + 100 * number + shift_ms
        came = at + 30 + late_ms
        steps.append(
            StepSample(
                at * MS,
                came * MS,
                (at + 100) * MS,
                0,
                0,
                (30 + late_ms) * MS,
                0,
                version=number + 1,
                fresh=True,
                samples=32,
            )
        )
        rounds.append(
            RoundSample(
                round=number,
                streamed=False,
                fresh=True,
                arrived_ns=came * MS,
                last="" if late_ms else "2.0",
                last_ns=0 if late_ms else (at + 30 + LATE_MS) * MS,
                go_ns=(at + 75) * MS,
                update_begun_ns=(at + 90) * MS,
                update_ended_ns=(at + 95) * MS,
                copy_begun_ns=0,
                copy_ended_ns=0,
                segments=(segment(at + 80, at + 90),),
            )
        )
    return RankSamples(f"{slot}.0#0", True, tuple(steps), tuple(rounds))


def pods(shift_ms: int = 0) -> list[PodSamples]:
    """The late one is on a host of its own, whose clock differs."""
    late = PodSamples("job", 2, "other", (rank(2, LATE_MS, shift_ms),))
    return [*(PodSamples("job", slot, "here", (rank(slot),)) for slot in (0, 1)), late]


def test_the_late_rank_is_blamed() -> None:
    job = analyse(pods())
    (blame,) = job.blame
    assert (blame.worker, blame.last) == ("2.0", ROUNDS)
    assert blame.per_step_s == pytest.approx(0.040)
    assert blame.blocked_s == pytest.approx(2 * ROUNDS * 0.040)
    assert job.parts[Part.BLOCKED] == pytest.approx(0.040 * 2 / 3)
    assert job.step_s == pytest.approx(0.1)


def test_advice_names_what_the_late_rank_does_longer() -> None:
    first = analyse(pods()).advice[0]
    assert first.what.endswith("mostly worker 2.0")
    assert "spends 70 ms of a step on backward, the others 30 ms" in first.change
    assert "Quorum of 2 would have saved 27 ms" in first.change


def test_a_job_without_lateness_gets_no_such_advice() -> None:
    job = analyse([PodSamples("job", 0, "here", (replace(rank(0), rounds=()),))])
    assert not job.blame
    assert not job.savings
    assert all("last rank" not in advice.what for advice in job.advice)


@given(st.integers(-900, 10**6))
def test_clocks_of_other_hosts_change_nothing(shift_ms: int) -> None:
    shifted, plain = analyse(pods(shift_ms)), analyse(pods())
    assert arrivals(shifted.ranks) == arrivals(plain.ranks)
    assert shifted.savings == plain.savings
    assert shifted.parts == plain.parts
    assert known_rounds(shifted.ranks) == range(ROUNDS)


def test_a_pod_that_does_not_answer_costs_only_what_takes_all() -> None:
    """The late one is blamed by name all the same."""
    known, silent = pods()[:2], [SilentPod("job-2-0", "no answer within 10 s")]
    job = analyse(known, silent)
    (blame,) = job.blame
    assert blame.worker == "2.0"
    assert blame.per_step_s == pytest.approx(0.040)
    assert not job.savings
    assert "would have saved" not in job.advice[0].change
    assert job.silent == tuple(silent)


def asked_later(pod: PodSamples, rounds: int) -> PodSamples:
    """When so many rounds more were made than the others know; as many old ones are forgotten."""
    (own,) = pod.ranks
    later = tuple(replace(one, round=one.round + rounds) for one in own.rounds)
    return replace(pod, ranks=(replace(own, rounds=later),))


def test_the_time_line_shows_rounds_that_most_ranks_know() -> None:
    first, second, third = pods()
    ranks = analyse([first, second, asked_later(third, 3)]).ranks
    assert known_rounds(ranks) == range(8)
    assert latest_rounds(ranks, 12) == range(5)
    assert latest_rounds(ranks, 2) == range(3, 5)
    assert latest_rounds((), 12) == range(0)


def test_a_host_without_a_round_in_common_has_no_clock() -> None:
    first, second, third = pods(shift_ms=500)
    job = analyse([first, second, asked_later(third, ROUNDS)])
    assert [rank.clock is None for rank in job.ranks] == [False, False, True]
    assert not job.savings
