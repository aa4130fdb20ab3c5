"""Every rank receives each message exactly once, and has few peers over all rounds (R41)."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.protocol.tree import BRANCHES, Grid, branches
from paceline_api.ids import MemberId

from testing.makers import members


@pytest.mark.parametrize("joiners", [0, 1, 2, 3, 7, 8, 100, 1023])
def test_a_state_reaches_every_joiner_once_in_few_hops(joiners: int) -> None:
    everybody, reached, hops = members(*range(joiners)), list[MemberId](), 0
    senders = [everybody]
    while any(senders):
        ways = [way for onward in senders for way in branches(onward)]
        assert all(len(list(branches(onward))) <= BRANCHES for onward in senders)
        reached += [member for member, _ in ways]
        senders, hops = [onward for _, onward in ways], hops + 1
    assert sorted(reached) == list(everybody)
    assert hops <= (joiners + 1).bit_length()


@pytest.mark.long
@given(st.integers(1, 200), st.integers(0, 500), st.data())
def test_every_rank_receives_go_exactly_once(ranks: int, round_: int, data: st.DataObject) -> None:
    everybody = members(*range(ranks))
    active = data.draw(st.sets(st.sampled_from(everybody), min_size=1))
    grid = Grid(everybody, active)
    starter = grid.starter(round_)
    assert starter in active
    ways = grid.ways(starter, round_)
    reached = [*ways, *(leaf for leaves in ways.values() for leaf in leaves)]
    assert sorted(reached) == [m for m in everybody if m != starter]
    for member in everybody:
        collector = grid.collector(member, round_)
        assert collector in active
        assert collector == starter or grid.number[collector] == grid.number[member]


def connections(ranks: int) -> tuple[int, int]:
    """Return the most sends of one rank in a round, and its most peers over all rounds."""
    everybody = members(*range(ranks))
    grid = Grid(everybody, set(everybody))
    peers, most = defaultdict[MemberId, set[MemberId]](set), 0
    turns = len(grid.groups) * max(map(len, grid.groups))
    # Each place of each group is the starter once; the heads are the same for a whole turn.
    for round_ in range(turns):
        starter = grid.starter(round_)
        ways = grid.ways(starter, round_)
        most = max(most, len(ways), *map(len, ways.values()))
        for head in ways:
            peers[starter].add(head)
            peers[head].add(starter)
    for member, others in peers.items():
        others.update(m for m in grid.groups[grid.number[member]] if m != member)
    return most, max(map(len, peers.values()))


@pytest.mark.parametrize("ranks", [64, 256, 1024])
def test_peers_of_a_rank_grow_with_the_square_root_of_the_job(ranks: int) -> None:
    root = round(ranks**0.5)
    assert connections(ranks) == (2 * (root - 1), 2 * (root - 1))


@pytest.mark.parametrize("ranks", [65, 100, 250, 1000])
def test_unequal_groups_add_only_a_few_peers(ranks: int) -> None:
    most, peers = connections(ranks)
    assert most <= 2 * ranks**0.5 + 1
    assert peers <= 3 * ranks**0.5 + 2


def test_every_rank_becomes_the_starter_in_turn() -> None:
    everybody = members(*range(100))
    grid = Grid(everybody, set(everybody))
    assert {grid.starter(r) for r in range(100)} == set(everybody)
