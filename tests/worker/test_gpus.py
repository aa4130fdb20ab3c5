"""Each rank takes its own GPU when it connects; torch's devices are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from paceline.worker.gpus import take_own_gpu


@dataclass
class RecordedCuda:
    devices: int
    begun: bool = False
    taken: list[int] = field(default_factory=list)

    def visible(self) -> int:
        return self.devices

    def in_use(self) -> bool:
        return self.begun

    def take(self, index: int) -> None:
        self.taken.append(index)


@pytest.mark.parametrize(
    ("index", "cuda", "want"),
    [
        (0, RecordedCuda(8), [0]),
        (3, RecordedCuda(8), [3]),
        (5, RecordedCuda(4), [1]),
        (1, RecordedCuda(1), []),
        (0, RecordedCuda(0), []),
        (3, RecordedCuda(8, begun=True), []),
    ],
    ids=["first", "own", "more ranks than GPUs", "one GPU", "no GPU", "the script has chosen"],
)
def test_each_rank_takes_its_own_gpu(index: int, cuda: RecordedCuda, want: list[int]) -> None:
    take_own_gpu(index, cuda)
    assert cuda.taken == want
