"""The ranks of one group that share a machine, as one of them has wired them.

A rank's *block* begins with words that only this rank writes (`core.collectives.shared`), followed
by its two bounce buffers. Each generation has blocks of its own, told apart by marks of 64 random
bits. A rank holds the memory and the eventfd of each other rank. The connection over which the pair
met stays open, and its end shows that the other rank is gone.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceline.core.collectives.shared import BOUNCE_BYTES
from paceline.core.demand import ROOMS_LEFT_MAX
from paceline.transport.base import Group, TransportError
from paceline.transport.rendezvous import Deadline, PeerConnections
from paceline.transport.shm.memory import SharedMemory, map_others
from paceline.transport.shm.rendezvous import LocalRendezvous, MachineFacts

# Words of a block. Mirrored in `transport/native/shared.c`.
MARK: Final = 0
STEP: Final = 1
SLEEPS: Final = 8
"""Index of the word that is not 0 while the rank has to be woken."""
SHOWS: Final = 16
"""Index of the words that describe the rank's buffer: bytes, kind, place. There are two sets, used
in turns like the bounce buffers."""
SHOW_WORDS: Final = 3
HEAD_WORDS: Final = 24
BOUNCES_AT: Final = mmap.PAGESIZE
BLOCK_BYTES: Final = BOUNCES_AT + 2 * BOUNCE_BYTES


@dataclass(slots=True)
class Member:
    """One rank of the machine. All arrays are read-only, except for this rank's own."""

    rank: int
    """Index in the group."""
    memory: Any
    """All of the rank's memory, as bytes."""
    place: int
    """Offset of the rank's block in its memory, in bytes."""
    mark: int
    eventfd: int
    connection: int
    """Descriptor of the connection to the rank. -1 for this rank itself."""

    @property
    def head(self) -> Any:
        """The words of the rank's block, as an array of uint64."""
        return self.memory[self.place : self.place + 8 * HEAD_WORDS].view(np.uint64)


class Room:
    """The members of a group that share this machine.

    `ranks` maps an index in this room to the rank in the group.
    """

    def __init__(self, memory: SharedMemory, eventfd: int, ranks: Sequence[int], own: int) -> None:
        self.memory = memory
        self.ranks = tuple(ranks)
        self.own = self.ranks.index(own)
        self.block: Any = memory.block(BLOCK_BYTES)
        self.eventfd = eventfd
        self.connections = PeerConnections()
        self.members: list[Member] = []
        self.parts = len(self.ranks)
        """Number of slices. The first members have one each."""
        self.far: list[tuple[int, int]] = []
        """Connections to ranks on other machines that wait for this one's slice, as (descriptor,
        rank). The room does not own them."""
        self.uses = self.step = 0
        """Number of uses of the bounce buffers so far, and of barriers so far."""
        self._mark = secrets.randbits(64) | 1
        self.place = int(self.block.ctypes.data) - memory.start
        self._words = self.block[: 8 * HEAD_WORDS].view(np.uint64)
        self._words[MARK] = self._mark

    def wire(self, rendezvous: LocalRendezvous, group: Group, deadline: Deadline) -> None:
        """Meet the other members and map their memory.

        After an error the caller has to `leave` the room.

        Args:
            rendezvous: Where the ranks of this machine meet.
            group: The whole group.
            deadline: When to give up.

        Raises:
            TransportError: A member cannot be reached or reports impossible facts.
        """
        facts = MachineFacts(self.memory.nbytes, self.place, self._mark)
        descriptors = self.memory.fd, self.eventfd
        by_rank = {group.rank: self._own_member()}
        above = [rank for rank in self.ranks if rank > group.rank]
        below = [rank for rank in self.ranks if rank < group.rank]
        # Higher ranks first: the highest one only answers, so ranks cannot wait in a cycle.
        for rank in (*reversed(above), *reversed(below)):
            theirs, (fd, eventfd), connection = rendezvous.swap(
                group, rank, facts, descriptors, deadline
            )
            self.connections.add(rank, connection)
            try:
                if theirs.block + BLOCK_BYTES > theirs.memory:
                    raise TransportError("the block of a rank lies outside of its memory")
                others = map_others(fd, theirs.memory)
            except TransportError:
                os.close(eventfd)
                raise
            finally:
                os.close(fd)
            by_rank[rank] = Member(
                rank,
                others,
                theirs.block,
                theirs.mark,
                eventfd,
                connection.fileno(),
            )
            self.members.append(by_rank[rank])
        self.members = [by_rank[rank] for rank in self.ranks]

    def _own_member(self) -> Member:
        memory, rank = self.memory.bytes, self.ranks[self.own]
        return Member(rank, memory, self.place, self._mark, self.eventfd, connection=-1)

    def always_wake(self) -> None:
        """Ask to be woken at every barrier, since the loop in Python cannot ask for it in time."""
        self._words[SLEEPS] = 1

    @property
    def has_left(self) -> bool:
        """Return True if this rank has given up."""
        return bool(self._words[MARK] != self._mark)

    def give_up(self) -> None:
        """Invalidate what others read in this rank's block after a failed reduction."""
        self._words[MARK] = 0
        self.connections.say_goodbye()

    def leave(self) -> bool:
        """Close what only this end needs. What others still read in the block stays valid.

        Returns:
            True if somebody may still read in the block. The caller keeps the room until
            `all_gone`.
        """
        for member in self.members:
            if member.eventfd != self.eventfd:
                os.close(member.eventfd)
        self.members = []
        if self.has_left:
            self.connections.close()
            return False
        self.connections.say_goodbye()
        return not self.all_gone()

    def all_gone(self) -> bool:
        """Return True if every other member has left this group."""
        return self.connections.all_lost()

    def forget(self) -> None:
        """Invalidate the block even if a member has not left."""
        self._words[MARK] = 0
        self.connections.close()


class Rooms:
    """The present room, and rooms that this rank has left while others may still read in them."""

    def __init__(self, memory: SharedMemory, place: str) -> None:
        self.memory = memory
        self.rendezvous = LocalRendezvous(place)
        self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.room: Room | None = None
        self._left: list[Room] = []

    def enter(self, group: Group, ranks: Sequence[int], deadline: Deadline) -> Room:
        """Leave the present room and wire a new one with these ranks of the group."""
        self.leave()
        room = self.room = Room(self.memory, self.eventfd, ranks, group.rank)
        try:
            room.wire(self.rendezvous, group, deadline)
        except BaseException:
            room.give_up()
            self.leave()
            raise
        return room

    def leave(self) -> None:
        """Leave the present room, and drop old ones that everybody has left."""
        room, self.room = self.room, None
        if room is not None and room.leave():
            self._left.append(room)
        self._left = [old for old in self._left if not old.all_gone()]
        while len(self._left) > ROOMS_LEFT_MAX:
            self._left.pop(0).forget()  # a rank still in it is stopped, and will notice later

    def close(self) -> None:
        """Leave all rooms and close the rendezvous and the eventfd."""
        self.leave()
        for old in self._left:
            old.forget()
        self._left = []
        self.rendezvous.close()
        if self.eventfd >= 0:
            os.close(self.eventfd)
            self.eventfd = -1
