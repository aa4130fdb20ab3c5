"""The loop in Python for sums in shared memory, act by act as `core.collectives.shared` names them.

It does what the loop in C does. It is used where that one cannot be built, and for types that it
does not add. It waits on the same descriptors. It always asks to be woken and always wakes
everybody, since Python cannot order a store before a load. x86-64 keeps the order of all other
pairs. Other processors need the fence of the native library.
"""

from __future__ import annotations

import os
import platform
import select
from collections.abc import Callable
from typing import Final

import torch

from paceline.core.collectives.shared import BOUNCE_BYTES, Act, What, is_small, reduction, slices
from paceline.transport.base import Abort, PeerLost, Stage, TransportAborted
from paceline.transport.rendezvous import CLOSED
from paceline.transport.shm.errors import different, gone_elsewhere, left
from paceline.transport.shm.room import BOUNCES_AT, MARK, SHOW_WORDS, SHOWS, SLEEPS, STEP, Room

Carry = Callable[[torch.Tensor, int, Stage], None]
"""Function that sums this rank's slice with those of other machines, in place. Its arguments are
the slice, the slice's byte offset in the buffer, and a stage that produces the sum inside the
machine."""
ORDERED: Final = ("x86_64", "AMD64")


def keeps_order() -> bool:
    """Return True if this processor keeps the order of stores, so that no fence is needed."""
    return platform.machine() in ORDERED


def no_fence() -> None:
    """Do nothing: the fence for processors where `keeps_order` is true."""


class PlainLoop:
    """Sums buffers over the ranks of one room. Used by one thread at a time."""

    def __init__(self, room: Room, fence: Callable[[], None]) -> None:
        self.room, self._fence = room, fence
        self._heads = [member.head for member in room.members]
        self._gone: set[int] = set()
        self._poll = select.poll()
        self._poll.register(room.eventfd, select.POLLIN)
        self._line_of = {m.connection: index for index, m in enumerate(room.members)}
        for member in room.members:
            if member.connection >= 0:
                self._poll.register(member.connection, CLOSED)
        self._far = dict(room.far)
        """Ranks on other machines, by the descriptor of the connection to each."""

    def reduce(
        self, data: torch.Tensor, kind: int, abort: Abort, carry: Carry | None = None
    ) -> None:
        """Sum one buffer over the ranks of the machine, in place.

        It raises TransportError if a rank has gone or given up, or if the abort flag goes up.

        Args:
            data: Flat tensor on the host, not empty.
            kind: Number of its type (`layout.KINDS` or `OTHER_KINDS`).
            abort: Ends the call when it is raised.
            carry: Sums the own slice with other machines. None if all ranks are on this machine.
        """
        call = _Call(self, data, kind, abort, carry)
        own = self._heads[self.room.own]
        before, own[SLEEPS] = int(own[SLEEPS]), 1
        with abort.waking(self.room.eventfd):
            for act in reduction(data.nbytes, call.in_place, carried=carry is not None):
                call.do(act)
        own[SLEEPS] = before

    def look(self, abort: Abort) -> None:
        """Raise PeerLost or TransportAborted if a rank has given up: its data is invalid then."""
        self._fence()
        for index, (head, member) in enumerate(zip(self._heads, self.room.members, strict=True)):
            if int(head[MARK]) != member.mark:
                raise left(self.room.ranks[index], abort)

    def barrier(self, abort: Abort, *, first: bool) -> None:
        """Wait until all ranks of the room have come to this step.

        Args:
            abort: Ends the wait when it is raised.
            first: True for the first barrier of a call. No rank on another machine can have
                finished this call by then, so one that closes its connection has died or given up.
        """
        self.look(abort)
        room = self.room
        room.step += 1
        self._fence()
        self._heads[room.own][STEP] = room.step
        self._fence()
        for member in room.members:
            if member.eventfd != room.eventfd:
                _wake(member.eventfd)
        for fd in self._far if first else ():
            self._poll.register(fd, CLOSED)
        try:
            self._wait(abort)
        finally:
            for fd in self._far if first else ():
                self._poll.unregister(fd)
        self._fence()

    def _wait(self, abort: Abort) -> None:
        room = self.room
        while not self._all_there():
            if abort.is_raised():
                raise TransportAborted("abandoned in a reduction")
            if self._gone:  # it left before this barrier was complete
                self.look(abort)
                rank = room.ranks[min(self._gone)]
                raise PeerLost(f"rank {rank} has gone", rank)
            self._sleep(abort)

    def _all_there(self) -> bool:
        return all(int(head[STEP]) >= self.room.step for head in self._heads)

    def _sleep(self, abort: Abort) -> None:
        for fd, _ in self._poll.poll():
            if fd == self.room.eventfd:
                os.eventfd_read(fd)
            elif fd in self._far:
                raise gone_elsewhere(self._far[fd], abort)
            else:
                self._gone.add(self._line_of[fd])
                self._poll.unregister(fd)

    def show(self, use: int) -> list[list[int]]:
        """Return the words in which each rank describes its buffer: bytes, kind, place."""
        at = SHOWS + SHOW_WORDS * (use & 1)
        return [[int(word) for word in head[at : at + SHOW_WORDS]] for head in self._heads]

    def say(self, use: int, words: list[int]) -> None:
        """Write this rank's description of its buffer."""
        at = SHOWS + SHOW_WORDS * (use & 1)
        self._heads[self.room.own][at : at + SHOW_WORDS] = words


class _Call:
    """The reduction of one buffer."""

    def __init__(
        self,
        loop: PlainLoop,
        data: torch.Tensor,
        kind: int,
        abort: Abort,
        carry: Carry | None,
    ) -> None:
        self._loop, self._room, self._carry = loop, loop.room, carry
        self._data, self._type, self._abort = data, data.dtype, abort
        self._bytes = data.view(torch.uint8)
        self._kind = kind
        small = is_small(data.nbytes, carried=carry is not None)
        self._place = 0 if small else self._room.memory.place(data)
        self._shows: list[list[int]] = []
        self._low = 0

    def in_place(self) -> list[bool]:
        """Return for each rank whether its buffer lies in shared memory."""
        return [place != 0 for _, _, place in self._shows]

    def do(self, act: Act) -> None:
        """Carry out one act of `core.collectives.shared.reduction`."""
        room, low, high = self._room, act.low, act.high
        match act.what:
            case What.SHOW:
                room.uses += 1
                self._low, self._shows = low, []
                self._loop.say(room.uses, [self._data.nbytes, self._kind, self._place])
                if not self._place:
                    self._bounce(room.own)[: high - low].copy_(self._bytes[low:high])
            case What.BARRIER:
                self._loop.barrier(self._abort, first=not self._shows)
                if not self._shows:
                    self._compare()
            case What.SUM_ALL:
                self._sum(self._bytes[low:high], low, high)
            case What.SUM:
                first, last = self._slice(low, high, room.own)
                self._sum(self._shown(room.own, first, last), first, last)
            case What.CARRY:
                first, last = self._slice(low, high, room.own)
                if first < last:
                    assert self._carry is not None
                    self._loop.look(self._abort)
                    self._carry(self._shown(room.own, first, last).view(self._type), first, Stage())
            case What.COPY:
                for index in range(room.parts):
                    first, last = self._slice(low, high, index)
                    self._bytes[first:last].copy_(self._shown(index, first, last))
            case What.LOOK:
                self._loop.look(self._abort)

    def _compare(self) -> None:
        self._shows = self._loop.show(self._room.uses)
        self._loop.look(self._abort)  # a rank that has left may show anything
        for index, (nbytes, kind, _) in enumerate(self._shows):
            if (nbytes, kind) != (self._data.nbytes, self._kind):
                raise different(self._room.ranks[index], nbytes, self._data.nbytes)

    def _slice(self, low: int, high: int, index: int) -> tuple[int, int]:
        parts = self._room.parts
        if index >= parts:
            return high, high
        at = slices(low, high, parts)
        return at[index], at[index + 1]

    def _bounce(self, index: int) -> torch.Tensor:
        member = self._room.members[index]
        at = member.place + BOUNCES_AT + BOUNCE_BYTES * (self._room.uses & 1)
        return torch.from_numpy(member.memory[at : at + BOUNCE_BYTES])

    def _shown(self, index: int, first: int, last: int) -> torch.Tensor:
        """Return the bytes first..last of a rank's buffer, in place or from its bounce buffer."""
        place = self._shows[index][2]
        if place:
            memory = self._room.members[index].memory
            return torch.from_numpy(memory[place + first : place + last])
        return self._bounce(index)[first - self._low : last - self._low]

    def _sum(self, target: torch.Tensor, first: int, last: int) -> None:
        if first == last:
            return
        total = self._shown(0, first, last).view(self._type).clone()
        for index in range(1, len(self._room.members)):
            total.add_(self._shown(index, first, last).view(self._type))
        target.view(self._type).copy_(total)


def _wake(eventfd: int) -> None:
    try:
        os.eventfd_write(eventfd, 1)
    except BlockingIOError:
        return  # its counter is full: it has not read 2^64 wake-ups
