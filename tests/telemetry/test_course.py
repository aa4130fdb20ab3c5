"""The moments that an agent keeps of its job."""

from __future__ import annotations

from itertools import pairwise
from math import nan

import msgspec
from paceline.core.anatomy.samples import COURSE_BYTES_MAX, FIGURES_MAX, MOMENTS_MAX
from paceline.telemetry.collector import Values
from paceline.telemetry.course import EVERY_S, Course


def values(rounds: float, **figures: tuple[float, float]) -> Values:
    """Return what a rank's record holds after some rounds."""
    made: Values = {("paceline_committed_rounds", ()): (rounds,)}
    for name, (total, weight) in figures.items():
        made["paceline_figure_number", (name,)] = (total,)
        made["paceline_figure_weight_number", (name,)] = (weight,)
    return made


def test_a_moment_has_the_latest_round_and_the_figures_that_a_rank_reports() -> None:
    course = Course()
    course.add(5.0, [values(7), values(8, loss=(3.0, 32.0)), {}])
    (moment,) = course.moments()
    assert (moment.wall_ms, moment.round) == (5000, 8)
    assert moment.figures == {"loss": (3.0, 32.0)}


def test_nothing_is_kept_before_the_first_round() -> None:
    course = Course()
    course.add(5.0, [])
    course.add(6.0, [values(0)])
    assert not course.moments()


def test_a_sum_that_is_not_a_number_is_left_out() -> None:
    course = Course()
    course.add(5.0, [values(1, loss=(nan, 32.0))])
    assert course.moments()[0].figures == {}


def test_a_day_of_moments_stays_within_its_bounds_and_reaches_from_start_to_end() -> None:
    course, now_s = Course(), 0.0
    names = [f"{number:032}" for number in range(FIGURES_MAX)]
    while now_s < 24 * 3600:
        sums = dict.fromkeys(names, (1e300 / 3, 1e300 / 7))
        course.add(now_s, [values(1 + now_s, **sums)])
        now_s += course.every_s
    kept = course.moments()
    assert MOMENTS_MAX / 4 < len(kept) <= MOMENTS_MAX
    assert kept[0].wall_ms == 0
    assert now_s - kept[-1].wall_ms / 1000 <= course.every_s
    apart = {later.wall_ms - one.wall_ms for one, later in pairwise(kept)}
    assert len(apart) == 1, "evenly spaced"
    assert course.every_s > EVERY_S
    assert len(msgspec.json.encode(kept)) <= COURSE_BYTES_MAX
