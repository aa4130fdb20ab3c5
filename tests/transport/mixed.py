"""The mpi transport in a group where every other rank has no compiler."""

from __future__ import annotations

from paceline.transport.base import Abort, Group
from paceline.transport.mpi.transport import MpiTransport


class MixedMpiTransport(MpiTransport):
    def __init__(self, *, host: str) -> None:
        super().__init__(host=host)
        self._loop = self._native

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        self._native = self._loop if group.rank % 2 else None
        super().open(group, abort, timeout_s)
