"""What abandoned requests of MPI may still touch, kept as long as need be and no longer.

A send to a process that has died never completes, and MPI may read from its buffer as long as it is
open. But once the other ends of a group's lifelines are closed, by death or because those processes
have left the group, nobody will use what was sent in it (I13). From then on a grave keeps addresses
only: its pages go back to the kernel. Beyond a few such graves the oldest sends are cancelled and
freed: a death costs no memory in the end, however many there are. A receive that has begun cannot
be cancelled and would write into what is freed, so a grave with such a one keeps its addresses.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.transport.rendezvous import Lifelines

EMPTIED_MAX: Final = 4
"""Graves whose memory is already given back; the connections of older ones are surely gone."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Memory that abandoned requests may touch, and what keeps its addresses from being reused."""

    address: int
    length: int
    owner: Any


@dataclass(slots=True)
class _Grave:
    receives: list[Any]
    sends: list[Any]
    memory: Sequence[Stretch]
    lifelines: Lifelines | None = None
    """Of its group, once we have left that."""
    emptied: bool = False


class Graves:
    """All abandoned requests of one process."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._graves: list[_Grave] = []

    def __len__(self) -> int:
        return len(self._graves)

    def bury(
        self, receives: Sequence[Any], sends: Sequence[Any], memory: Sequence[Stretch]
    ) -> None:
        """Give up requests of the present group."""
        grave = _Grave(self._open(receives), self._open(sends), memory)
        if grave.receives or grave.sends:
            self._graves.append(grave)

    def _open(self, requests: Sequence[Any]) -> list[Any]:
        return [request for request in requests if request != self._mpi.REQUEST_NULL]

    def leave(self, lifelines: Lifelines) -> bool:
        """The present group is left. True: a grave needs its lifelines, they are taken over."""
        fresh = [grave for grave in self._graves if grave.lifelines is None]
        if fresh:
            lifelines.say_goodbye()
        for grave in fresh:
            grave.lifelines = lifelines
        return bool(fresh)

    def clean(self) -> None:
        testall = self._mpi.Request.Testall
        self._graves = [g for g in self._graves if not testall(g.receives) or not testall(g.sends)]
        for grave in self._graves:
            if not grave.emptied and grave.lifelines is not None and grave.lifelines.all_lost():
                for stretch in grave.memory:
                    _give_back(stretch)
                grave.emptied = True
        spent = [g for g in self._graves if g.emptied and testall(g.receives)]
        for grave in spent[: max(0, len(spent) - EMPTIED_MAX)]:
            for request in self._open(grave.sends):
                request.Cancel()
                request.Free()
            self._graves.remove(grave)


def _give_back(stretch: Stretch) -> None:
    """Return the whole pages of some memory to the kernel; the addresses stay valid, reading 0."""
    page = mmap.PAGESIZE
    low = -(-stretch.address // page) * page
    high = (stretch.address + stretch.length) // page * page
    if low < high and _libc.madvise(low, high - low, mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise")
