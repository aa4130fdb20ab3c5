"""The agent's ends of the sockets that carry messages between its ranks and the coordinator (R43).

They exist beside the pipe (`agent.rank_pipe`), which is for the agent and its rank alone. Sending
never blocks: packets that a rank does not read wait in a bounded queue. If the queue is full, it is
dropped, and the rank is asked to introduce itself again. So a stopped rank blocks nobody, and
misses nothing when it goes on.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Final, Protocol

from paceline_api.ids import MemberId

from paceline.control import packets

QUEUE_MAX: Final = 256
"""Number of packets that wait for one rank. A change of the membership sends a handful to each
rank."""


class Voice(Protocol):
    """Receiver of what the ranks send; `control.voice.PodVoice` implements it."""

    def open(self, member: MemberId) -> None:
        """Note that this rank has a line now."""

    def receive(self, member: MemberId, data: bytes) -> None:
        """Take a packet that the rank has sent."""

    def anew(self, member: MemberId) -> None:
        """Note that queued packets to the rank were dropped.

        The rank has to introduce itself again.
        """

    def close(self, member: MemberId) -> None:
        """Note that the line to this rank has ended."""


class RankLines:
    """The lines of all ranks of the pod, by member. Used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, voice: Voice) -> None:
        self._loop, self._voice = loop, voice
        self._lines: dict[MemberId, _Line] = {}

    def open(self, member: MemberId) -> socket.socket:
        """Make the line of a rank and return the rank's end, which the caller closes."""
        ours, theirs = packets.pair()
        self._lines[member] = _Line(self._loop, self._voice, member, ours)
        self._voice.open(member)
        return theirs

    def tell(self, member: MemberId, data: bytes) -> None:
        """Queue a packet for a rank. Do nothing if it has no line."""
        if (line := self._lines.get(member)) is not None:
            line.send(data)

    def end(self, member: MemberId) -> None:
        """Pass on what a dead process sent, then close its line."""
        if (line := self._lines.pop(member, None)) is not None:
            line.drain()
            line.close()

    def close(self) -> None:
        """End all lines."""
        for member in list(self._lines):
            self.end(member)


class _Line:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        voice: Voice,
        member: MemberId,
        ours: socket.socket,
    ) -> None:
        self._loop, self._voice, self._member, self._socket = loop, voice, member, ours
        self._queue: deque[bytes] = deque()
        self._open = True
        loop.add_reader(ours.fileno(), self._read)

    def send(self, data: bytes) -> None:
        if not self._open:
            return
        self._queue.append(data)
        if len(self._queue) > QUEUE_MAX:
            self._queue.clear()
            self._voice.anew(self._member)
        elif len(self._queue) == 1:
            self._write()

    def drain(self) -> None:
        while self._read():
            pass

    def close(self) -> None:
        """Close the line once. Also called when the rank has closed its end."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._voice.close(self._member)

    def _write(self) -> None:
        while self._queue:
            try:
                packets.send(self._socket, self._queue[0])
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
            except OSError:
                break  # the rank has closed its end; the reader notices too
            self._queue.popleft()
        self._queue.clear()
        self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> bool:
        if not self._open:
            return False
        try:
            data = packets.receive(self._socket)
        except BlockingIOError:
            return False
        if data is None:
            self.close()
            return False
        self._voice.receive(self._member, data)
        return True
