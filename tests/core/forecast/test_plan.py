"""Plans show forecasts beside measurements, and the book keeps what was shown before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.forecast.book import (
    MEASURED_MAX,
    Book,
    Measurement,
    enter,
    rows,
    show,
)
from paceline.core.forecast.model import RunRow
from paceline.core.forecast.plan import BY_PLAN, BY_ROWS, Asked, Plan, make
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from tests.core.forecast.rows import ideal


def measured(row: RunRow, source: str = "--measure", at_s: float = 0.0) -> Measurement:
    return Measurement(source, at_s, row.setting, row.step_s, row)


def asked(**changes: Any) -> Asked:
    settings = RoundSettings(mode=Mode.QUORUM, quorum_percent=75)
    plain = Asked("job", settings, 4, 1, (1, 2, 4, 8), (1,), (), {})
    return replace(plain, **changes)


BOOK = enter(Book(), [measured(ideal(p)) for p in (1, 2, 4)])


def forecasts(plan: Plan) -> dict[tuple[int, str], float]:
    return {(line.forecast.setting.ranks, line.mode): line.forecast.step_s for line in plan.lines}


def test_a_plan_lists_each_size_in_the_modes_that_differ_there() -> None:
    plan = make(asked(), BOOK)
    assert list(forecasts(plan)) == [
        (1, "Quorum 1"),
        (2, "Quorum 2"),
        (2, "Quorum 1"),
        (4, "Full"),
        (4, "Quorum 3"),
        (8, "Full"),
        (8, "Quorum 7"),
        (8, "Quorum 6"),
        (8, "Majority"),
    ]
    (own,) = (line for line in plan.lines if line.own)
    assert (own.forecast.setting.members, own.mode) == (4, "Quorum 3")
    assert forecasts(plan)[8, "Full"] == pytest.approx(ideal(8).step_s)


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_the_line_of_the_job_has_its_own_quorum(quorum: int) -> None:
    """The advice once compared with the larger quorum, which is always forecast."""
    settings = RoundSettings(mode=Mode.QUORUM, quorum=quorum)
    plan = make(asked(settings=settings), BOOK)
    (own,) = (line for line in plan.lines if line.own)
    assert (own.forecast.setting.members, own.mode) == (4, f"Quorum {quorum}")


def test_two_measured_quorums_give_two_rows() -> None:
    """The second measurement once replaced the first.

    It was then compared with the forecast of the first.
    """
    full = ideal(4)
    two, three = (replace(full, setting=replace(full.setting, quorum=q)) for q in (2, 3))
    book = show(BOOK, (x.forecast for x in make(asked(ranks=(4,)), BOOK).lines), at_s=1.0)
    book = enter(book, [measured(three, at_s=2.0)])
    book = enter(book, [measured(two, at_s=3.0)])
    assert [row.setting.quorum for row in rows(book) if row.setting.members == 4] == [4, 3, 2]
    shown = {one.setting.quorum: one.shown for one in book.measured if one.at_s > 1}
    assert shown[2] is None, "nothing was said of a quorum of 2"
    assert shown[3] is not None
    assert shown[3].setting.quorum == 3


def test_a_deadline_is_not_forecast() -> None:
    plan = make(asked(settings=RoundSettings(mode=Mode.DEADLINE)), BOOK)
    assert not any(line.own for line in plan.lines)
    assert "no comparison" in plan.advice


def test_each_row_is_predicted_from_the_other_rows() -> None:
    plan = make(asked(), BOOK)
    assert [one.by for one in plan.compared] == [BY_ROWS] * 3
    assert [one.spread_s for one in plan.compared] == pytest.approx([0, 0, 0])
    assert plan.error is not None
    # Only the row of four separates the link's alpha from its beta.
    assert plan.compared[0].error == pytest.approx(0, abs=1e-6)


def test_a_single_row_has_no_prediction_error() -> None:
    plan = make(asked(), enter(Book(), [measured(ideal(2))]))
    assert plan.error is None
    assert "measure another size" in plan.advice


def test_an_earlier_forecast_is_compared_with_a_later_measurement() -> None:
    plan = make(asked(ranks=(8,)), BOOK)
    book = show(BOOK, (line.forecast for line in plan.lines), at_s=10.0)
    slower = replace(ideal(8), step_s=2 * ideal(8).step_s)
    book = enter(book, [measured(slower, "job-1, 1.1", at_s=20.0)])
    last = make(asked(), book).compared[-1]
    assert (last.by, last.predicted_s) == (BY_PLAN, forecasts(plan)[8, "Full"])
    assert last.error == pytest.approx(-0.5)
    # A plan made after the run does not change the forecast made before it.
    later = make(asked(ranks=(8,)), book)
    book = show(book, (line.forecast for line in later.lines), at_s=30.0)
    book = enter(book, [measured(slower, "job-1, 1.1", at_s=20.0)])
    assert make(asked(), book).compared[-1].predicted_s == last.predicted_s


def test_a_forecast_made_during_a_run_is_not_compared_with_that_run() -> None:
    plan = make(asked(ranks=(8,)), BOOK)
    book = show(BOOK, (line.forecast for line in plan.lines), at_s=30.0)
    book = enter(book, [measured(ideal(8), "job-1, 1.1", at_s=20.0)])
    assert book.measured[-1].shown is None


def test_a_measurement_keeps_its_row_when_entered_again_without_one() -> None:
    row = ideal(2)
    book = enter(Book(), [measured(row, "job-1, 1.1")])
    only_step = Measurement("job-1, 1.1", 0.0, row.setting, row.step_s)
    assert rows(enter(book, [only_step])) == [row]


def test_a_step_time_without_a_row_is_compared_but_not_used_for_the_fit() -> None:
    row = ideal(8)
    alone = Measurement("job-1, 1.1", 1.0, row.setting, row.step_s * 1.25)
    plan = make(asked(), enter(BOOK, [alone]))
    assert plan.compared[-1].error == pytest.approx(-0.2)
    assert forecasts(plan) == forecasts(make(asked(), BOOK))


def test_a_plan_compares_groups_with_replicas() -> None:
    unknown = make(asked(models=(1, 2)), BOOK).contests
    assert [(one.model, one.speedup, one.groups) for one in unknown] == [(2, None, None)]
    assert [each.groups for each in unknown[0].needed] == [1, 4, 16]
    (given_,) = make(asked(models=(1, 2), speedups={2: 1.6}), BOOK).contests
    assert given_.speedup == 1.6
    assert given_.groups == 1, "two replicas pay for a link that one group does not need"
    assert given_.gain == pytest.approx(1.6 / given_.needed[0].speedup)
    with_groups = enter(BOOK, [measured(ideal(2, model=2))])
    plan = make(asked(models=(1, 2)), with_groups)
    assert plan.contests[0].speedup == pytest.approx(1.6)
    assert (4, "Full") in forecasts(plan)


def test_a_gain_below_the_prediction_error_gives_no_recommendation() -> None:
    plan = make(asked(), BOOK)
    assert "You decide" in plan.advice
    bad = replace(ideal(4), step_s=100 * ideal(4).step_s)
    plan = make(asked(), enter(BOOK, [measured(bad, "job-1, 1.1")]))
    assert "Nothing here is better" in plan.advice


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 8)), max_size=100))
def test_a_book_is_bounded_sorted_and_without_duplicates(runs: list[tuple[int, int]]) -> None:
    book = Book()
    for at_s, members in runs:
        book = enter(book, [measured(ideal(members), f"job-{at_s}", at_s=float(at_s))])
    assert len(book.measured) <= MEASURED_MAX
    assert [m.at_s for m in book.measured] == sorted(m.at_s for m in book.measured)
    assert len({(m.source, m.setting.members) for m in book.measured}) == len(book.measured)
