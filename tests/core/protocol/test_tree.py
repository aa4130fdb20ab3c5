"""Everybody gets GO exactly once, nobody sends it to many, and relays take turns."""

from __future__ import annotations

from core.makers import members
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.protocol.tree import TREE_ABOVE, fan_out


@given(st.integers(1, 200), st.data())
def test_everybody_gets_it_exactly_once(ranks: int, data: st.DataObject) -> None:
    everybody = members(*range(ranks))
    active = sorted(data.draw(st.sets(st.sampled_from(everybody), min_size=1)))
    starter = data.draw(st.sampled_from(active))
    above = data.draw(st.integers(0, 100))
    ways = fan_out(everybody, active, starter, data.draw(st.integers(0, 500)), above)
    reached = [*ways, *(leaf for leaves in ways.values() for leaf in leaves)]
    assert sorted(reached) == [m for m in everybody if m != starter]
    if any(ways.values()) and len(active) > len(ways):
        assert set(ways) <= set(active), "relays are active while there are enough"


def test_nobody_sends_to_more_than_the_square_root() -> None:
    for ranks in (TREE_ABOVE + 1, 100, 1000, 4096):
        everybody = members(*range(ranks))
        ways = fan_out(everybody, everybody, everybody[5], 17)
        assert len(ways) <= ranks**0.5 + 1
        assert max(map(len, ways.values())) <= ranks**0.5 + 1


def test_few_are_told_directly() -> None:
    everybody = members(*range(TREE_ABOVE))
    ways = fan_out(everybody, everybody, everybody[0], 3)
    assert ways == dict.fromkeys(everybody[1:], ())


def test_relays_take_turns() -> None:
    everybody = members(*range(100))
    seen = {relay for r in range(100) for relay in fan_out(everybody, everybody, everybody[0], r)}
    assert seen == set(everybody[1:])
