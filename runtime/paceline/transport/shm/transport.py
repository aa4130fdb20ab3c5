"""The data channel of ranks that all run on one machine: every byte is copied at most once.

A reduction is a few barriers over counters in memory that the ranks hand to each other
(`core.collectives.shared`). Buffers from `zeros` lie there themselves and are summed in place;
others go through bounce buffers, piece by piece.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import torch

from paceline.core.collectives.conduct import Conduct
from paceline.limits import LimitError
from paceline.transport.base import HOST, Abort, Group, Transport, TransportError
from paceline.transport.native import SHARED, UnavailableError, load
from paceline.transport.native.layout import KINDS
from paceline.transport.rendezvous import Deadline
from paceline.transport.shm.memory import SharedMemory
from paceline.transport.shm.native_loop import NativeLoop
from paceline.transport.shm.plain_loop import Carry, PlainLoop, keeps_order, no_fence
from paceline.transport.shm.rendezvous import machine_place, place_of
from paceline.transport.shm.room import Room, Rooms

log = logging.getLogger("paceline.rank")

OTHER_KINDS: Final = {
    torch.float16: 64,
    torch.int16: 65,
    torch.int8: 66,
    torch.uint8: 67,
}
"""Beside `KINDS`: added in Python."""


class LocalSums:
    """Sums over the ranks of one machine; what `shm` does, and the inner part of `hier`."""

    def __init__(self, memory: SharedMemory, *, place: str = "", native: bool = True) -> None:
        """`place`: equal in ranks that count as being on one machine; empty: the machine's own.
        Raises TransportError."""
        self.place = place or machine_place()
        self.memory = memory
        self._library: ctypes.CDLL | None = None
        self._why_python = "asked for"
        if native:
            try:
                self._library = load(SHARED)
            except UnavailableError as error:
                self._why_python = str(error)
                log.warning("shm runs in Python, which a busy script slows down: %s", error)
        if self._library is None and not keeps_order():
            raise TransportError(
                "shm needs a C compiler on this processor, whose stores have no order: "
                f"{self._why_python}"
            )
        self.rooms = Rooms(memory, self.place)
        self._native: NativeLoop | None = None
        self._plain: PlainLoop | None = None

    @property
    def address(self) -> str:
        return self.rooms.rendezvous.address

    def open(
        self, group: Group, ranks: Sequence[int], deadline: Deadline, parts: int | None = None
    ) -> None:
        """Wire these ranks of the group; `parts`: so many of them sum a slice, else all. Raises
        TransportError."""
        self.close()
        try:
            room = self.rooms.enter(group, ranks, deadline)
        except LimitError as error:
            raise TransportError(f"{error.message}; hint: {error.hint}") from error
        room.parts = len(ranks) if parts is None else parts
        self._make_loops(room)

    def watch(self, far: Sequence[tuple[int, int]]) -> None:
        """Connections (descriptor, rank of the group) to ranks on other machines: a death there
        ends waits here."""
        assert self.rooms.room is not None, "a group first"
        self.rooms.room.far = list(far)
        self._make_loops(self.rooms.room)

    def _make_loops(self, room: Room) -> None:
        if self._library is not None:
            # A rank that looks takes the core of one that works if they share it.
            spins = len(room.ranks) <= len(os.sched_getaffinity(0))
            self._native = NativeLoop(self._library, room, spins=spins)
            fence: Callable[[], None] = self._library.paceline_fence
        else:
            fence = no_fence
            room.always_wake()
        self._plain = PlainLoop(room, fence)

    def reduce(self, buffer: torch.Tensor, abort: Abort, carry: Carry | None = None) -> None:
        room, data = self.rooms.room, buffer.detach()
        assert room is not None, "a sum outside a group"
        assert self._plain is not None
        if data.device.type != HOST.type:
            raise TransportError(
                f"shm sums host memory only, this buffer is on {data.device}; "
                "hint: set spec.collective.backend: nccl"
            )
        assert data.dim() == 1, tuple(data.shape)
        assert data.is_contiguous(), data.stride()
        if not data.numel() or (len(room.ranks) == 1 and carry is None):
            return
        try:
            if self._native is not None and data.dtype in KINDS:
                self._native.reduce(data, KINDS[data.dtype], abort, carry)
            else:
                kind = {**KINDS, **OTHER_KINDS}[data.dtype]
                self._plain.reduce(data, kind, abort, carry)
        except BaseException:
            room.give_up()  # before anybody writes to what others may still read
            raise

    def close(self) -> None:
        self._native = self._plain = None
        self.rooms.leave()

    def shutdown(self) -> None:
        self._native = self._plain = None
        self.rooms.close()
        self.memory.close()

    @property
    def in_python(self) -> str:
        """Why the loop runs there; empty where it does not."""
        return "" if self._library else self._why_python

    def describe(self) -> dict[str, str]:
        return {"loop": f"python: {self.in_python}" if self.in_python else "native"}


class ShmTransport(Transport):
    """Sums in shared memory; host memory of one machine only."""

    name: ClassVar[str] = "shm"
    sums_in_place: ClassVar[bool] = True
    rounds: ClassVar[bool] = True

    def __init__(self, memory: SharedMemory, *, place: str = "", native: bool = True) -> None:
        """Raises TransportError."""
        self._sums = LocalSums(memory, place=place, native=native)
        self._group: Group | None = None

    @property
    def address(self) -> str:
        return self._sums.address

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != HOST.type:
            return super().zeros(numel, dtype, device)
        return self._sums.memory.zeros(numel, dtype)

    def unfit(self, addresses: Sequence[str]) -> str:
        places = [place_of(address) for address in addresses]
        other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if other is None:
            return ""
        return (
            f"shm sums inside one machine or pod, and rank {other} runs in another one than "
            "rank 0; hint: use backend: auto or mpi"
        )

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        self.close()
        if why := self.unfit([peer.address for peer in group.peers]):
            raise TransportError(why)
        self._sums.open(group, range(group.size), Deadline(abort, timeout_s))
        self._group = group

    def allreduce(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,  # noqa: ARG002
    ) -> None:
        assert self._group is not None, "allreduce outside a group"
        for buffer in buffers:
            self._sums.reduce(buffer, abort)

    def allreduce_rounded(
        self,
        buffers: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],  # noqa: ARG002
        abort: Abort,
        algorithm: str,
    ) -> None:
        """Nothing travels, so nothing is rounded."""
        self.allreduce(buffers, abort, algorithm)

    def close(self) -> None:
        self._group = None
        self._sums.close()

    def shutdown(self) -> None:
        self.close()
        self._sums.shutdown()

    def conducts(self) -> tuple[Conduct, ...]:
        return (Conduct(self.name, wire=None, in_python=self._sums.in_python),)

    def describe(self) -> dict[str, str]:
        return self._sums.describe()
