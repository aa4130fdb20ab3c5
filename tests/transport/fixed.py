"""The mpi transport held to one of its algorithms; two of these in a process share nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from paceline.transport.base import Abort, Group
from paceline.transport.mpi.transport import MpiTransport


class FixedAlgorithm(MpiTransport):
    def __init__(self, *, host: str, algorithm: str, mixed: bool) -> None:
        super().__init__(host=host)
        self._algorithm = algorithm
        self._mixed, self._loop = mixed, self._native

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        if self._mixed:  # every other rank is one without a compiler
            self._native = self._loop if group.rank % 2 else None
        super().open(group, abort, timeout_s)

    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str = "") -> None:
        super().allreduce(buffers, abort, algorithm or self._algorithm)
