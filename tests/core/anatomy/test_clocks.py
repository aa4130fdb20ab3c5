"""Clocks of hosts that count from different moments are aligned, with a true error bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.anatomy.clocks import Clock, ReductionSpan, align

MS = 10**6
DAY_MS = 24 * 3600 * 1000


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[int], list[dict[int, ReductionSpan]]]:
    """Draw the clocks of some hosts and what the hosts recorded of rounds 0 to 9.

    In each round, a host begins to contribute at some moment and ends after the last host has
    begun.

    Returns:
        The nanoseconds to add to each host's clock, and the recorded sums of each host by round.
    """
    shifts = draw(st.lists(st.integers(-DAY_MS, DAY_MS), min_size=2, max_size=4))
    noted: list[dict[int, ReductionSpan]] = [{} for _ in shifts]
    for number in range(10):
        begun = [100 * number + draw(st.integers(0, 20)) for _ in shifts]
        for own, shift, at in zip(noted, shifts, begun, strict=True):
            end = max(begun) + draw(st.integers(0, 30))
            own[number] = ReductionSpan((at - shift) * MS, (end - shift) * MS)
    return [shift * MS for shift in shifts], noted


@pytest.mark.long
@given(stories())
def test_aligned_clocks_are_within_their_stated_error(
    story: tuple[list[int], list[dict[int, ReductionSpan]]],
) -> None:
    shifts, noted = story
    clocks = align({str(host): own for host, own in enumerate(noted)})
    assert clocks["0"] == Clock(0, 0), "of equals the first one"
    for host, shift in enumerate(shifts):
        clock = clocks[str(host)]
        assert abs(shift - shifts[0] - clock.shift_ns) <= clock.off_ns
        assert clock.off_ns <= 80 * MS, "a round takes 50, and the ends are 30 apart"


@pytest.mark.long
@given(stories())
def test_hosts_without_common_rounds_are_aligned_through_others(
    story: tuple[list[int], list[dict[int, ReductionSpan]]],
) -> None:
    """The first and the last host share no round, and are linked by those between."""
    shifts, noted = story
    windows = {
        str(host): {n: own[n] for n in range(2 * host, 2 * host + 3)}
        for host, own in enumerate(noted)
    }
    clocks = align(windows)
    for host, shift in enumerate(shifts):
        clock = clocks[str(host)]
        assert abs(shift - shifts[0] - clock.shift_ns) <= clock.off_ns


def test_a_repeated_round_does_not_shift_a_clock() -> None:
    """The second host repeats round 1 a second later."""
    first = {n: ReductionSpan(100 * n * MS, (100 * n + 5) * MS) for n in range(5)}
    second = first | {1: ReductionSpan(1100 * MS, 1105 * MS)}
    assert align({"a": first, "b": second})["b"] == Clock(0, 5 * MS)


def test_a_host_without_common_rounds_has_no_clock() -> None:
    own = {n: ReductionSpan(n * MS, n * MS) for n in range(5)}
    assert set(align({"a": own, "new": {7: own[0]}, "b": own, "mute": {}})) == {"a", "b"}
    assert align({"alone": {}}) == {"alone": Clock(0, 0)}
    assert not align({})
