"""The formulas of the step-anatomy study, checked against a schedule simulated per segment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.anatomy import FORWARD, bound, hides, paid, step

shares = st.floats(0, 3)
counts = st.integers(1, 40)
delays = st.floats(0, 3)


def played(c: float, n: int, *, late: float = 0.0, at: int = 0) -> float:
    """Return when the last sum of a step ends if the last rank is late before segment `at`."""
    over = 0.0
    for segment in range(n):
        ready = FORWARD + (1 - FORWARD) * (segment + 1) / n + (late if segment >= at else 0.0)
        over = max(over, ready) + c / n
    return over


@given(c=shares, n=counts)
def test_the_formula_for_a_step_without_delays_matches_the_schedule(c: float, n: int) -> None:
    assert step(c, n) == pytest.approx(played(c, n))


@given(c=shares, n=counts, late=delays)
def test_a_delay_before_backward_is_exposed_in_full(c: float, n: int, late: float) -> None:
    added = played(c, n, late=late) - played(c, n)
    assert added == pytest.approx(late)
    assert paid("backward", late, c, n) == paid("step", late, c, n) == late


@given(c=shares, n=counts, late=delays)
def test_a_delay_before_the_last_segment_is_partly_hidden(c: float, n: int, late: float) -> None:
    added = played(c, n, late=late, at=n - 1) - played(c, n)
    assert paid("last segment", late, c, n) == pytest.approx(added, abs=1e-9)


@given(c=shares, n=counts, late=delays, data=st.data())
def test_no_delay_is_hidden_beyond_the_bound(
    c: float, n: int, late: float, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, n - 1))
    hidden = late - (played(c, n, late=late, at=at) - played(c, n))
    assert hidden <= hides(c, n) + 1e-9
    assert hides(c, n) <= bound(c, n) + 1e-9


@given(c=shares, n=counts, work=st.floats(0, 5))
def test_work_beside_a_step_is_exposed_once_the_gap_is_used_up(
    c: float, n: int, work: float
) -> None:
    """Evaluation delays step(), and therefore only the last segment (R29)."""
    late = max(0.0, work - 1)
    added = played(c, n, late=late, at=n - 1) - played(c, n)
    assert paid("evaluation", work, c, n) == pytest.approx(added, abs=1e-9)
    assert paid("data", work, c, n) == pytest.approx(max(0.0, work - played(c, n)), abs=1e-9)
