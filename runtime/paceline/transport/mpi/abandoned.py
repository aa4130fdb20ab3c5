"""Keeps memory that abandoned requests of MPI may still touch, and frees it when that is safe.

A send to a process that has died never completes, and MPI may read from its buffer as long as it is
open. But once the other ends of a group's connections are closed, by death or because those
processes have left the group, nobody uses what was sent in it (I13). From then on an abandoned call
keeps addresses only: its pages go back to the kernel. Beyond a few such calls, the sends of the
oldest are canceled and freed, so the memory is bounded however many deaths there are. A receive
that has begun cannot be canceled and would write into freed memory, so a call with such a receive
keeps its addresses.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.transport.rendezvous import PeerConnections

EMPTIED_MAX: Final = 4
"""Number of abandoned calls that are kept after their memory was given back. The peers of older
ones are surely gone."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Memory that abandoned requests may touch. `owner` keeps its addresses from being reused."""

    address: int
    length: int
    owner: Any


@dataclass(slots=True)
class _AbandonedCall:
    """The requests of one abandoned call, and the memory that they may touch."""

    receives: list[Any]
    sends: list[Any]
    memory: Sequence[MemoryRange]
    connections: PeerConnections | None = None
    """Connections of the call's group, once this rank has left it."""
    emptied: bool = False


class AbandonedRequests:
    """The abandoned requests of one process."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._abandoned: list[_AbandonedCall] = []

    def __len__(self) -> int:
        return len(self._abandoned)

    def keep(
        self, receives: Sequence[Any], sends: Sequence[Any], memory: Sequence[MemoryRange]
    ) -> None:
        """Take over requests of the present group that were given up, with their memory."""
        call = _AbandonedCall(self._open(receives), self._open(sends), memory)
        if call.receives or call.sends:
            self._abandoned.append(call)

    def _open(self, requests: Sequence[Any]) -> list[Any]:
        return [request for request in requests if request != self._mpi.REQUEST_NULL]

    def leave(self, connections: PeerConnections) -> bool:
        """Note that this rank leaves the present group.

        Args:
            connections: Connections of that group.

        Returns:
            True if an abandoned call needs the connections. Then they belong to this object.
        """
        fresh = [call for call in self._abandoned if call.connections is None]
        if fresh:
            connections.say_goodbye()
        for call in fresh:
            call.connections = connections
        return bool(fresh)

    def clean(self) -> None:
        """Drop completed calls, and give memory back whose peers have all left."""
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
    """Return the whole pages of some memory to the kernel. The addresses stay valid and read as 0.

    Args:
        stretch: The memory.

    Raises:
        OSError: The kernel refuses it.
    """
    page = mmap.PAGESIZE
    low = -(-stretch.address // page) * page
    high = (stretch.address + stretch.length) // page * page
    if low < high and _libc.madvise(low, high - low, mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise")
