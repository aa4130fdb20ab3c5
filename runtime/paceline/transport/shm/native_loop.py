"""Runs sums in shared memory with the loop in C: one call without the interpreter lock."""

from __future__ import annotations

import ctypes
import select
from typing import ClassVar, Final

import torch

from paceline.core.collectives.shared import BOUNCE_BYTES, SMALL_BYTES
from paceline.transport.base import Abort, NativeStage, PeerLost, Stage, TransportAborted
from paceline.transport.native.layout import Fields
from paceline.transport.rendezvous import CLOSED
from paceline.transport.shm.errors import different, gone_elsewhere, left
from paceline.transport.shm.plain_loop import Carry
from paceline.transport.shm.room import BOUNCES_AT, SHOW_WORDS, SHOWS, Room

DONE, ABORTED, LOST, LEFT, DIFFERENT, CARRY = range(6)
SPIN_NS: Final = 50_000
"""Longest time to spin before a wait sleeps, in nanoseconds. It is halved each time it was in vain,
and 0 where ranks share cores."""


class _Member(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("block", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("mark", ctypes.c_uint64),
        ("place", ctypes.c_uint64),
        ("eventfd", ctypes.c_int32),
        ("gone", ctypes.c_int32),
    ]


class _PollFd(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("fd", ctypes.c_int),
        ("events", ctypes.c_short),
        ("revents", ctypes.c_short),
    ]


class _Room(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("members", ctypes.POINTER(_Member)),
        ("lines", ctypes.POINTER(_PollFd)),
        ("count", ctypes.c_int32),
        ("line_count", ctypes.c_int32),
        ("own", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("who", ctypes.c_int32),
        ("far", ctypes.c_int32),
        ("step", ctypes.c_uint64),
        ("uses", ctypes.c_uint64),
        ("memory_bytes", ctypes.c_uint64),
        ("bounces_at", ctypes.c_int64),
        ("bounce_bytes", ctypes.c_int64),
        ("small_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("patience_ns", ctypes.c_int64),
        ("abort", ctypes.POINTER(ctypes.c_int32)),
    ]


class _Call(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("data", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("itemsize", ctypes.c_int32),
        ("place", ctypes.c_int64),
        ("carried", ctypes.c_int32),
        ("resumed", ctypes.c_int32),
        ("low", ctypes.c_int64),
        ("high", ctypes.c_int64),
        ("carry_place", ctypes.c_int64),
        ("carry_bytes", ctypes.c_int64),
        ("carry_at", ctypes.c_int64),
        ("staged", ctypes.c_int32),
        ("copied", ctypes.POINTER(ctypes.c_int64)),
    ]


class _Stage(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("room", ctypes.POINTER(_Room)),
        ("call", ctypes.POINTER(_Call)),
    ]


class _Slice(Stage):
    """The stage of this rank's slice when all buffers are in place.

    It sums the slice inside the machine piece by piece, and copies the slices of others as far as
    they are complete.
    """

    def __init__(self, library: ctypes.CDLL, room: _Room, call: _Call) -> None:
        self._make, self._take = library.paceline_shared_make, library.paceline_shared_take
        self._owner = _Stage(ctypes.pointer(room), ctypes.pointer(call))
        make, take = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (self._make, self._take))
        self.native = NativeStage(make, take, ctypes.addressof(self._owner), self._owner)

    def make(self, low: int, high: int) -> None:
        """Sum the bytes low..high of the slice inside the machine."""
        self._make(ctypes.byref(self._owner), ctypes.c_int64(low), ctypes.c_int64(high))

    def take(self, done: int) -> None:
        """Publish how far the slice is complete, and copy what is complete of the others."""
        self._take(ctypes.byref(self._owner), ctypes.c_int64(done))


class ShmNativeLoop:
    """The C library, with the data that it needs about one room."""

    def __init__(self, library: ctypes.CDLL, room: Room, *, spins: bool) -> None:
        self._library = library
        self._run = library.paceline_shared
        self._run.argtypes = [ctypes.POINTER(_Room), ctypes.POINTER(_Call)]
        self._room = room
        members = room.members
        spin_ns = SPIN_NS if spins else 0
        self._members = (_Member * len(members))(
            *(
                _Member(start + m.place, start, m.mark, 0, m.eventfd, 0)
                for m in members
                for start in (m.memory.ctypes.data,)
            )
        )
        far = [_PollFd(fd, CLOSED, 0) for fd, _ in room.far]
        self._lines = (_PollFd * (len(members) + len(far)))(
            *(
                _PollFd(room.eventfd, select.POLLIN, 0)
                if m.connection < 0
                else _PollFd(m.connection, CLOSED, 0)
                for m in members
            ),
            *far,
        )
        self._native = _Room(
            self._members,
            self._lines,
            len(members),
            len(self._lines),
            room.own,
            room.parts,
            0,
            0,
            0,
            0,
            min(len(m.memory) for m in members),
            BOUNCES_AT,
            BOUNCE_BYTES,
            SMALL_BYTES,
            spin_ns,
            spin_ns,
        )

    def reduce(
        self, data: torch.Tensor, kind: int, abort: Abort, carry: Carry | None = None
    ) -> None:
        """Sum one buffer, with the arguments and errors of `PlainLoop.reduce`."""
        room, native = self._room, self._native
        native.step, native.uses, native.abort = room.step, room.uses, ctypes.pointer(abort.flag)
        call = _Call(
            data.data_ptr(),
            data.nbytes,
            kind,
            data.element_size(),
            room.memory.place(data),
            carry is not None,
            copied=(ctypes.c_int64 * room.parts)(),
        )
        with abort.waking(room.eventfd):
            while (result := self._run(ctypes.byref(native), ctypes.byref(call))) == CARRY:
                if call.carry_bytes:
                    assert carry is not None
                    stage = _Slice(self._library, native, call) if call.staged else Stage()
                    carry(self._slice(call, data), call.carry_at, stage)
                call.resumed = 1
        room.step, room.uses = native.step, native.uses
        if result == DONE:
            return
        if result == ABORTED:
            raise TransportAborted("abandoned in a reduction")
        if result == LOST and native.who >= len(room.ranks):
            rank = room.far[native.who - len(room.ranks)][1]
            raise gone_elsewhere(rank, abort)
        rank = room.ranks[native.who]
        if result == LOST:
            raise PeerLost(f"rank {rank} has gone", rank)
        if result == LEFT:
            raise left(rank, abort)
        assert result == DIFFERENT, result
        at = SHOWS + SHOW_WORDS * (room.uses & 1)
        raise different(rank, int(room.members[native.who].head[at]), data.nbytes)

    def _slice(self, call: _Call, data: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice for `carry`, as a tensor that keeps its memory alive."""
        first = call.carry_place
        if call.place:
            first -= call.place
            whole = data.view(torch.uint8)
        else:
            first -= self._room.place
            whole = torch.from_numpy(self._room.block)
        return whole[first : first + call.carry_bytes].view(data.dtype)
