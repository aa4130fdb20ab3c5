"""Baidu's ring, re-implemented: a ring of blocking sends and receives per tensor, in their order.

As in its extension of TensorFlow, there is no fusion: each tensor is a reduce-scatter and an
allgather of its own, P - 1 steps each. Here they run after backward, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.rivals.rank import Array, System, Trainer, split
from benchmarks.rivals.systems.mpi import Mpi


class BaiduRing(Mpi):
    """Ring allreduce with MPI_Sendrecv."""

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer in a reduce-scatter and an allgather."""
        rank, size = self.rank, self.ranks
        right, left = (rank + 1) % size, (rank - 1) % size
        pieces = list(split(buffer, [len(part) for part in np.array_split(buffer, size)]))
        received = np.empty_like(pieces[0])
        for step in range(size - 1):
            mine, theirs = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
            into = received[: len(theirs)]
            self.world.Sendrecv(mine, right, recvbuf=into, source=left)
            theirs += into
        for step in range(size - 1):
            mine, theirs = pieces[(rank + 1 - step) % size], pieces[(rank - step) % size]
            self.world.Sendrecv(mine, right, recvbuf=theirs, source=left)

    def trainer(self, tensors: Sequence[int]) -> Trainer:
        """Return a loop with one allreduce per tensor."""
        return PerTensor(self, tensors)


class PerTensor(Trainer):
    """Loop that sums each tensor after backward."""

    def finish(self) -> None:
        """Sum each tensor and update the weights."""
        for part in reversed(self.parts):
            self.system.allreduce(part)
        self.update()


def make(_: list[str]) -> System:
    """Return the system."""
    return BaiduRing()
