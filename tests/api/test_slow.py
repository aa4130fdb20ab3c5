"""Straggler detection: which rank is slow, since when, and which response applies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline_api.settings import StragglerSettings
from paceline_api.slow import SlowVerdict, StepTime, judge
from paceline_api.types.enums import StragglerResponse as Do

LADDER = (Do.TOLERATE, Do.RESTART_IN_PLACE, Do.REPLACE)
SETTINGS = StragglerSettings(50, 1.5, LADDER, 100 * 10**9)


def look(now_s: float, since: dict[str, float], **steps: float) -> SlowVerdict:
    paces = [StepTime(key, step_s) for key, step_s in steps.items()]
    return judge(paces, SETTINGS, round_s=0.1, since=since, now_s=now_s)


def test_a_rank_slow_for_a_whole_window_climbs_the_response_ladder() -> None:
    steps = {"a": 0.1, "b": 0.1, "c": 0.3}
    first = look(10.0, {}, **steps)
    assert (first.slow, first.since, first.look_again_s) == ((), {"c": 10.0}, 15.0)
    for now_s, action, again_s in (
        (15.0, Do.TOLERATE, 110.0),
        (110.0, Do.RESTART_IN_PLACE, 210.0),
        (250.0, Do.REPLACE, None),
        (999.0, Do.REPLACE, None),
    ):
        verdict = look(now_s, {"c": 10.0}, **steps)
        [slow] = verdict.slow
        assert (slow.key, slow.percent, slow.since_s) == ("c", 300, 10.0)
        assert (slow.action, verdict.look_again_s) == (action, again_s)


def test_differences_of_a_few_milliseconds_do_not_count_as_slow() -> None:
    """Ranks that share processors can differ by a factor of 8 over a few milliseconds.

    A response would gain nothing there.
    """
    since = {"b": 1.0, "c": 1.0}
    assert look(50.0, since, a=0.001, b=0.002, c=0.008).slow == ()
    [slow] = look(50.0, since, a=0.001, b=0.002, c=0.013).slow
    assert slow.key == "c"


def test_a_fast_measurement_resets_the_timer_and_a_missing_one_keeps_it() -> None:
    since = {"b": 10.0, "c": 10.0, "gone": 10.0}
    assert look(50.0, since, a=0.1, b=0.1, c=0.0).since == {"c": 10.0}
    assert look(50.0, since, b=0.1).since == {"b": 10.0}, "one alone is compared with nobody"


def test_the_slowest_is_listed_first_and_of_two_ranks_the_faster_is_the_norm() -> None:
    verdict = look(50.0, {"c": 1.0, "d": 1.0}, a=0.1, b=0.1, e=0.1, c=0.2, d=0.4)
    assert [slow.key for slow in verdict.slow] == ["d", "c"]
    assert look(50.0, {"b": 1.0}, a=0.1, b=0.2).slow[0].percent == 200


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.001, 10.0), min_size=1))
@pytest.mark.long
def test_at_most_half_of_the_ranks_are_slow(steps: dict[str, float]) -> None:
    verdict = look(1e6, dict.fromkeys(steps, 0.0), **steps)
    assert len(verdict.slow) <= len(steps) // 2
    assert all(slow.percent >= 149 for slow in verdict.slow)
