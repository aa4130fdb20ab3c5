"""The most that the processes of a job may have open, against what they really open."""

from __future__ import annotations

import pytest
from paceline.core.collectives.schedules import ALGORITHMS, partners
from paceline.core.demand import (
    agent_files,
    coordinator_files,
    local_processes,
    most_partners,
    rank_files,
)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13, 31, 64, 100])
def test_no_rank_has_more_partners_over_mpi_than_counted(ranks: int) -> None:
    most = max(len(partners(ALGORITHMS, ranks, rank)) for rank in range(ranks))
    assert most <= most_partners(ranks)


def test_what_each_process_may_have_open() -> None:
    assert rank_files(1, ["gloo"]) == 0
    assert rank_files(1024, ["gloo"]) == 1023 * (6 + 3)
    assert rank_files(1024, ["mpi"]) == 1023 * 6 + 64 + 13 * 6
    assert rank_files(8, ["mpi", "gloo", "nccl"]) < 256
    assert coordinator_files(1024, 128) == 1152
    assert agent_files(8) < 128
    assert local_processes(16, 8, mpi=True) == 73


@pytest.mark.parametrize("transports", [["mpi"], ["gloo"], ["mpi", "gloo", "nccl"]])
def test_twice_the_ranks_need_at_most_twice_the_files(transports: list[str]) -> None:
    for ranks in (64, 256, 1024):
        assert rank_files(2 * ranks, transports) <= 2.05 * rank_files(ranks, transports)
