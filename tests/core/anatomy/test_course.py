"""Speed and figures over time, from the moments that agents keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.anatomy.course import POINTS_MAX, SPEED, course
from paceline.core.anatomy.samples import Moment, PodSamples

from testing.anatomy_samples import BEGAN_MS, moments, pods


def pod(slot: int, own: tuple[Moment, ...]) -> PodSamples:
    return PodSamples("job", slot, "here", (), own)


def test_speed_and_figures_are_means_between_two_points() -> None:
    speed, loss = course(pods())
    assert (speed.name, loss.name) == (SPEED, "loss")
    assert {point.value for point in speed.points} == {10.0}
    assert loss.points[0].value == pytest.approx(1.0)
    assert loss.points[-1].value == pytest.approx(1 / 40)
    assert loss.points[-1].at_s == BEGAN_MS / 1000 + 40


def test_a_pause_of_the_job_shows_as_speed_zero() -> None:
    before = moments(count=21)
    after = tuple(
        replace(one, wall_ms=one.wall_ms + 40_000, round=one.round + 200) for one in before
    )
    pause = tuple(replace(before[-1], wall_ms=before[-1].wall_ms + 1000 * s) for s in range(1, 20))
    (speed,) = course([pod(0, (*before, *pause, *after))])
    assert {point.value for point in speed.points} == {0.0, 10.0}


def test_the_time_after_the_end_of_all_ranks_is_no_pause() -> None:
    own = moments(count=21)
    rest = tuple(replace(own[-1], wall_ms=own[-1].wall_ms + 1000 * s) for s in range(1, 20))
    (speed,) = course([pod(0, (*own, *rest))])
    assert {point.value for point in speed.points} == {10.0}


def test_figures_continue_when_another_pod_reports_them() -> None:
    whole = moments("loss")
    halves = [pod(0, whole[:20]), pod(1, whole[20:])]
    assert course(halves)[1] == course([pod(0, whole)])[1]


def test_a_job_of_few_rounds_has_no_course() -> None:
    assert course([pod(0, moments("loss", count=5, per_s=1))]) == ()
    assert course([pod(0, ())]) == ()


def test_a_long_course_has_a_bounded_number_of_points() -> None:
    for line in course([pod(0, moments("loss", count=256))]):
        assert POINTS_MAX / 2 <= len(line.points) <= POINTS_MAX


NUMBERS = st.integers(0, 2**63 - 1) | st.integers(0, 50)
SUMS = st.tuples(st.floats(), st.floats())
MOMENTS = st.builds(Moment, NUMBERS, NUMBERS, st.dictionaries(st.sampled_from("ab"), SUMS))


@pytest.mark.long
@given(st.lists(st.lists(MOMENTS, max_size=20), max_size=3))
def test_a_course_of_any_moments_is_finite_and_in_order_of_time(each: list[list[Moment]]) -> None:
    for line in course([pod(slot, tuple(own)) for slot, own in enumerate(each)]):
        times = [point.at_s for point in line.points]
        assert times == sorted(times)
        assert all(abs(point.value) < float("inf") for point in line.points)
