"""The agent's ends of the lines over which its ranks speak with the coordinator (R43).

Beside the pipe, which is the agent's own with its rank. Sending never blocks: what a rank does not
read waits in a bounded queue; when that is full it is thrown away, and the rank is told that it has
to introduce itself anew. So a stopped rank holds up nobody, and misses nothing when it goes on.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Final, Protocol

from paceline.control import packets
from paceline.core.protocol.ids import MemberId

QUEUE_MAX: Final = 256
"""Packets. A change of the membership sends a handful to each rank."""


class Voice(Protocol):
    """What hears of lines: `control.voice.PodVoice`."""

    def open(self, member: MemberId) -> None: ...
    def heard(self, member: MemberId, data: bytes) -> None: ...
    def anew(self, member: MemberId) -> None: ...
    def close(self, member: MemberId) -> None: ...


class RankLines:
    def __init__(self, loop: asyncio.AbstractEventLoop, voice: Voice) -> None:
        self._loop, self._voice = loop, voice
        self._lines: dict[MemberId, _Line] = {}

    def open(self, member: MemberId) -> socket.socket:
        """The end for the rank."""
        ours, theirs = packets.pair()
        self._lines[member] = _Line(self._loop, self._voice, member, ours)
        self._voice.open(member)
        return theirs

    def tell(self, member: MemberId, data: bytes) -> None:
        if (line := self._lines.get(member)) is not None:
            line.send(data)

    def end(self, member: MemberId) -> None:
        """The process is dead: what it has said by then is passed on."""
        if (line := self._lines.pop(member, None)) is not None:
            line.drain()
            line.close()

    def close(self) -> None:
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
        """Also at its end, once."""
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
                break  # it has ended; the reader sees that too
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
        self._voice.heard(self._member, data)
        return True
