"""The mpi transport held to one of its algorithms; two of these in a process share nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from paceline.transport.base import Abort
from paceline.transport.mpi import MpiTransport


class FixedAlgorithm(MpiTransport):
    def __init__(self, *, host: str, algorithm: str) -> None:
        super().__init__(host=host)
        self._algorithm = algorithm

    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str = "") -> None:
        super().allreduce(buffers, abort, algorithm or self._algorithm)
