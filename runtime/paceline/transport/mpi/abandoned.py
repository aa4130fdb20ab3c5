"""What abandoned requests of MPI may still touch, kept as long as need be and no longer.

A send to a process that has died never completes, and MPI may read from its buffer as long as it is
open. But once the other ends of a group's connections are closed, by death or because those
processes have left the group, nobody will use what was sent in it (I13). From then on an
abandoned call keeps addresses only: its pages go back to the kernel. Beyond a few such calls the
oldest sends are cancelled and freed: a death costs no memory in the end, however many there are. A
receive that has begun cannot be cancelled and would write into what is freed, so a call with such a
one keeps its addresses.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.transport.rendezvous import PeerConnections

EMPTIED_MAX: Final = 4
"""Abandoned calls whose memory is already given back; the peers of older ones are surely gone."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Memory that abandoned requests may touch, and what keeps its addresses from being reused."""

    address: int
    length: int
    owner: Any


@dataclass(slots=True)
class _AbandonedCall:
    """The requests of one call that was given up, and the memory that they may touch."""

    receives: list[Any]
    sends: list[Any]
    memory: Sequence[MemoryRange]
    connections: PeerConnections | None = None
    """Of its group, once we have left that."""
    emptied: bool = False


class AbandonedRequests:
    """All abandoned requests of one process."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._abandoned: list[_AbandonedCall] = []

    def __len__(self) -> int:
        return len(self._abandoned)

    def keep(
        self, receives: Sequence[Any], sends: Sequence[Any], memory: Sequence[MemoryRange]
    ) -> None:
        """Take over requests of the present group that were given up."""
        call = _AbandonedCall(self._open(receives), self._open(sends), memory)
        if call.receives or call.sends:
            self._abandoned.append(call)

    def _open(self, requests: Sequence[Any]) -> list[Any]:
        return [request for request in requests if request != self._mpi.REQUEST_NULL]

    def leave(self, connections: PeerConnections) -> bool:
        """The present group is left. True: a call needs its connections, they are taken over."""
        fresh = [call for call in self._abandoned if call.connections is None]
        if fresh:
            connections.say_goodbye()
        for call in fresh:
            call.connections = connections
        return bool(fresh)

    def clean(self) -> None:
        testall = self._mpi.Request.Testall
        self._abandoned = [
            g for g in self._abandoned if not testall(g.receives) or not testall(g.sends)
        ]
        for call in self._abandoned:
            if not call.emptied and call.connections is not None and call.connections.all_lost():
                for stretch in call.memory:
                    _give_back(stretch)
                call.emptied = True
        spent = [g for g in self._abandoned if g.emptied and testall(g.receives)]
        for call in spent[: max(0, len(spent) - EMPTIED_MAX)]:
            for request in self._open(call.sends):
                request.Cancel()
                request.Free()
            self._abandoned.remove(call)


def _give_back(stretch: MemoryRange) -> None:
    """Return the whole pages of some memory to the kernel; the addresses stay valid, reading 0."""
    page = mmap.PAGESIZE
    low = -(-stretch.address // page) * page
    high = (stretch.address + stretch.length) // page * page
    if low < high and _libc.madvise(low, high - low, mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise")
