"""The data channel of ranks that all run on one machine. Each byte is copied at most once.

A reduction is a few barriers over counters in memory that the ranks pass to each other
(`core.collectives.shared`). Buffers from `zeros` lie in that memory themselves and are summed in
place. Other buffers go through bounce buffers, piece by piece.
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
from paceline.transport.shm.native_loop import ShmNativeLoop
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
"""Numbers of the types that only the loop in Python adds, beside `KINDS`."""


class LocalSums:
    """Sums over the ranks of one machine.

    `shm` is made of it, and so is the inner level of `hier`.
    """

    def __init__(self, memory: SharedMemory, *, place: str = "", native: bool = True) -> None:
        """Load the native loop and open the rendezvous.

        Args:
            memory: Memory of this rank.
            place: Text that is equal on ranks that count as being on one machine. Empty: that of
                the machine.
            native: False to use the loop in Python.

        Raises:
            TransportError: The processor needs the native loop and it cannot be built.
        """
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
        self._native: ShmNativeLoop | None = None
        self._plain: PlainLoop | None = None

    @property
    def address(self) -> str:
        """Address at which ranks of this machine reach this one."""
        return self.rooms.rendezvous.address

    def open(
        self, group: Group, ranks: Sequence[int], deadline: Deadline, parts: int | None = None
    ) -> None:
        """Wire the ranks of this machine.

        Args:
            group: The whole group.
            ranks: Ranks of the group that are on this machine.
            deadline: When to give up.
            parts: How many of them sum a slice. None: all.

        Raises:
            TransportError: They cannot be wired.
        """
        self.close()
        try:
            room = self.rooms.enter(group, ranks, deadline)
        except LimitError as error:
            raise TransportError(f"{error.message}; hint: {error.hint}") from error
        room.parts = len(ranks) if parts is None else parts
        self._make_loops(room)

    def watch(self, far: Sequence[tuple[int, int]]) -> None:
        """Watch connections (descriptor, rank) to other machines: a death there ends waits here."""
        assert self.rooms.room is not None, "a group first"
        self.rooms.room.far = list(far)
        self._make_loops(self.rooms.room)

    def _make_loops(self, room: Room) -> None:
        if self._library is not None:
            # Where ranks share cores, one that spins takes the core of one that works.
            spins = len(room.ranks) <= len(os.sched_getaffinity(0))
            self._native = ShmNativeLoop(self._library, room, spins=spins)
            fence: Callable[[], None] = self._library.paceline_fence
        else:
            fence = no_fence
            room.always_wake()
        self._plain = PlainLoop(room, fence)

    def reduce(self, buffer: torch.Tensor, abort: Abort, carry: Carry | None = None) -> None:
        """Sum one buffer over the ranks of this machine, in place.

        It raises PeerLost or TransportAborted if the sum cannot be completed.

        Args:
            buffer: Flat, contiguous tensor in host memory.
            abort: Ends the call when it is raised.
            carry: Sums this rank's slice with other machines. None if there are none.

        Raises:
            TransportError: The buffer is not in host memory.
        """
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
            room.give_up()  # before this rank reuses memory that others may still read
            raise

    def close(self) -> None:
        """Leave the room."""
        self._native = self._plain = None
        self.rooms.leave()

    def shutdown(self) -> None:
        """Leave all rooms and close the memory. Tensors in it stay valid."""
        self._native = self._plain = None
        self.rooms.close()
        self.memory.close()

    @property
    def in_python(self) -> str:
        """Why the loop runs in Python. Empty if it does not."""
        return "" if self._library else self._why_python

    def describe(self) -> dict[str, str]:
        """Return which loop runs."""
        return {"loop": f"python: {self.in_python}" if self.in_python else "native"}


class ShmTransport(Transport):
    """Sums in shared memory, for host memory of one machine."""

    name: ClassVar[str] = "shm"
    sums_in_place: ClassVar[bool] = True
    rounds: ClassVar[bool] = True

    def __init__(self, memory: SharedMemory, *, place: str = "", native: bool = True) -> None:
        """Prepare sums over the ranks of this machine.

        It raises TransportError if the machine cannot run them.

        Args:
            memory: Memory of this rank, owned by the transport from now on.
            place: Text that is equal on ranks that count as being on one machine. Empty: that of
                the machine.
            native: False to use the loop in Python.
        """
        self._sums = LocalSums(memory, place=place, native=native)
        self._group: Group | None = None

    @property
    def address(self) -> str:
        """Address at which ranks of this machine reach this one."""
        return self._sums.address

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer in shared memory, which is summed without a copy.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            device: Where the buffer lies. Memory of other devices is ordinary memory.

        Returns:
            A tensor of shape (numel,).
        """
        if device.type != HOST.type:
            return super().zeros(numel, dtype, device)
        return self._sums.memory.zeros(numel, dtype)

    def unfit(self, addresses: Sequence[str]) -> str:
        """Return the reason if a rank runs on another machine, or in another pod.

        Args:
            addresses: Address of each rank.

        Returns:
            The reason, or an empty text.
        """
        places = [place_of(address) for address in addresses]
        other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if other is None:
            return ""
        return (
            f"shm sums inside one machine or pod, and rank {other} runs in another one than "
            "rank 0; hint: use backend: auto or mpi"
        )

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        """Wire the group in shared memory.

        Args:
            group: The members.
            abort: Ends the call when it is raised.
            timeout_s: Seconds after which it fails.

        Raises:
            TransportError: A rank is on another machine or cannot be reached.
        """
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
        """Sum the buffers one after the other, in member order."""
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
        """Sum the buffers in float32: nothing travels, so nothing is rounded."""
        self.allreduce(buffers, abort, algorithm)

    def close(self) -> None:
        """Leave the group."""
        self._group = None
        self._sums.close()

    def shutdown(self) -> None:
        """Leave the group and close the memory. Tensors in it stay valid."""
        self.close()
        self._sums.shutdown()

    def conducts(self) -> tuple[Conduct, ...]:
        """Return one value: nothing travels, and perhaps the loop runs in Python."""
        return (Conduct(self.name, wire=None, in_python=self._sums.in_python),)

    def describe(self) -> dict[str, str]:
        """Return which loop runs."""
        return self._sums.describe()
