"""Upper bounds on the open files of a job's processes, against what they really open."""

from __future__ import annotations

import pytest
from paceline.core.collectives.schedules import ALGORITHMS, partners
from paceline.core.demand import (
    GRIDS,
    agent_files,
    coordinator_files,
    local_processes,
    most_partners,
    most_peers,
    rank_files,
)
from paceline.core.protocol.tree import Grid
from paceline_api.ids import MemberId

from testing.makers import members


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13, 31, 64, 100])
def test_no_rank_has_more_mpi_partners_than_most_partners(ranks: int) -> None:
    most = max(len(partners(ALGORITHMS, ranks, rank)) for rank in range(ranks))
    assert most <= most_partners(ranks)


def test_file_limits_of_each_process_match_known_values() -> None:
    assert rank_files(1, ["gloo"]) == 0
    assert rank_files(64, ["gloo"]) == 63 * (6 + 3), "everybody speaks to everybody"
    assert rank_files(1024, ["gloo"]) == 256 * 4 + 1023 * (2 + 3)
    assert rank_files(1024, ["mpi"]) == 256 * 4 + 1023 * 2 + 64 + 13 * 6
    assert rank_files(64, ["shm"]) == 63 * (6 + 4) + 8
    assert rank_files(64, ["hier:gloo"]) == 63 * (6 + 3 + 4) + 8, (
        "what carries and what sums inside"
    )
    assert rank_files(8, ["mpi", "gloo", "nccl", "shm"]) < 256
    assert coordinator_files(128) == 256
    assert agent_files(8) < 160
    assert local_processes(16, 8, mpi=True) == 73


@pytest.mark.parametrize("ranks", [65, 100, 128, 256, 300])
def test_no_rank_has_more_peers_in_a_generation_than_most_peers(ranks: int) -> None:
    """Every tenth rank is passive, so that others stand in for it."""
    everybody = members(*range(ranks))
    active = {x for x in everybody if x.slot % 10}
    grid, peers = Grid(everybody, active), {x: set[MemberId]() for x in everybody}
    for round_ in range(ranks):
        starter = grid.starter(round_)
        links = [(grid.collector(x, round_), x) for x in everybody]
        for at, onward in grid.ways(starter, round_).items():
            links += [(starter, at), *((at, x) for x in onward)]
        for a, b in links:
            peers[a].add(b)
            peers[b].add(a)
    assert GRIDS * max(len(others - {x}) for x, others in peers.items()) <= most_peers(ranks)


@pytest.mark.parametrize("transports", [["mpi"], ["gloo"], ["shm"], ["mpi", "gloo", "nccl", "shm"]])
def test_twice_the_ranks_need_at_most_twice_the_files(transports: list[str]) -> None:
    for ranks in (64, 256, 1024):
        assert rank_files(2 * ranks, transports) <= 2.05 * rank_files(ranks, transports)
