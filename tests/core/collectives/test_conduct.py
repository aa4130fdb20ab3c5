"""Description of how a transport sums, short enough for a status."""

from __future__ import annotations

import pytest
from paceline.core.collectives.conduct import Bits, Conduct, describe_conduct
from paceline_api.types.enums import Wire


@pytest.mark.parametrize(
    ("conduct", "words"),
    [
        (Conduct("mpi"), ""),
        (Conduct("shm", wire=None), ""),
        (Conduct("mpi", Wire.BFLOAT16), "mpi: float32 travels as BFloat16"),
        (
            Conduct("nccl", bits=Bits.COMPARED),
            "nccl: its allreduce gave all ranks the same bits",
        ),
        (
            Conduct("nccl", bits=Bits.ONE_RANK),
            "nccl: one rank reduces and broadcasts, since its allreduce gave ranks other bits",
        ),
        (
            Conduct("hier:mpi", machines=(0, 0, 1, 0, 1)),
            "hier:mpi: 2 machines (ranks 0-1, 3 | 2, 4), slices are summed inside, then between",
        ),
        (
            Conduct("mpi", by_host=True, in_python="no compiler"),
            "mpi: gradients go through host memory, its loop runs in Python (no compiler)",
        ),
    ],
)
def test_the_conduct_of_a_transport_is_described(conduct: Conduct, words: str) -> None:
    assert describe_conduct(conduct) == words


def test_a_long_list_of_machines_is_abbreviated() -> None:
    words = describe_conduct(Conduct("hier:mpi", machines=tuple(rank // 8 for rank in range(1024))))
    assert "128 machines (ranks 0-7 | 8-15 |" in words
    assert "| 56-63 and 120 more)" in words
    assert len(words) < 200
