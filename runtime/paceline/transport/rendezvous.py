"""Where two ranks meet before they move data: one TCP connection per pair and generation.

A link of MPI can only be made when both sides stand ready at the same moment: Accept and Connect
hold the lock of the whole library while they wait. So the pair meets over a plain socket first. The
lower rank dials, says which generation it is wiring, and both agree on what follows; an absent or
stopped peer is noticed here, where every wait has an abort flag and a deadline.

The socket then stays open as long as the group. No data goes over it: the kernel of a dead peer
closes it, so a reduction learns of the death without asking anybody.

There is no listening thread. Between two generations, callers wait in the kernel's backlog.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from paceline.clock import NS_PER_MS, NS_PER_S, now_ns
from paceline.limits import LISTEN_BACKLOG, MORE_FILES
from paceline.transport.base import Abort, Group, Peer, PeerLost, TransportAborted, TransportError

FRAME_BYTES_MAX: Final = 1 << 20
"""Of one message. What grows with the group is sent in several."""
SEND_NS: Final = NS_PER_S
STRANGERS_MAX: Final = 512
"""Callers that have not said who they are, beside one for each rank of the group; programs that
look for open ports do that."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Drawn when a machine starts; the same in all its containers."""
POLL_S: Final = 0.01
REDIAL_S: Final = 0.05
LAST_WORDS_NS: Final = 100 * NS_PER_MS
"""A peer that has finished its part may close its group before we have read all it sent."""
KEEPALIVE: Final = {
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 6,
}
"""A connection to a machine that is gone closes after 45 s without an answer of its kernel."""
CLOSED: Final = select.POLLIN | select.POLLRDHUP
"""What poll tells of a closed connection: nobody writes on it after the rendezvous."""
_HEADER: Final = struct.Struct("!I")


class _Descriptor(Protocol):
    def fileno(self) -> int: ...


class Deadline:
    """When a blocking call must give up, and the flag that makes it give up earlier."""

    def __init__(self, abort: Abort, timeout_s: float) -> None:
        self.abort = abort
        self.timeout_s = timeout_s
        self._end_ns = now_ns() + timeout_s * NS_PER_S

    def left_s(self) -> float:
        return (self._end_ns - now_ns()) / NS_PER_S

    def check(self, what: str, rank: int | None = None) -> None:
        if self.abort.is_raised():
            raise TransportAborted(f"abandoned while {what}")
        if now_ns() >= self._end_ns:
            raise PeerLost(f"no answer within {self.timeout_s:g} s while {what}", rank)

    def pause(self, seconds: float, what: str, rank: int | None = None) -> None:
        self.check(what, rank)
        self.abort.wait(max(0.0, min(seconds, self.left_s())))


class PeerClosedError(Exception):
    """The other end closed or broke the connection."""


class PeerConnection:
    """One connection that carries short JSON messages."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The machine of a peer may vanish without a word: ask it now and then.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.sock = sock
        self._received = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def end_sending(self) -> None:
        with suppress(OSError):  # the other end has closed already
            self.sock.shutdown(socket.SHUT_WR)

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        assert len(body) <= FRAME_BYTES_MAX, len(body)
        left = memoryview(_HEADER.pack(len(body)) + body)
        end_ns = now_ns() + SEND_NS
        while left:
            try:
                left = left[self.sock.send(left) :]
            except BlockingIOError:
                # The buffers of the socket are full, so the peer does not read; seldom and short.
                if now_ns() > end_ns:
                    raise PeerClosedError("the peer does not read") from None
                _ready([self.sock], select.POLLOUT, POLL_S)
            except OSError as error:
                raise PeerClosedError(str(error)) from error

    def poll(self) -> dict[str, Any] | None:
        """The next message if it is all here. Raises PeerClosedError when the peer has left."""
        while (message := self._take()) is None:
            try:
                data = self.sock.recv(1 << 16)
            except BlockingIOError:
                return None
            except OSError as error:
                raise PeerClosedError(str(error)) from error
            if not data:
                raise PeerClosedError("connection closed")
            self._received += data
        return message

    def _take(self) -> dict[str, Any] | None:
        if len(self._received) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._received)
        if size > FRAME_BYTES_MAX:
            raise PeerClosedError(f"a frame of {size} bytes: not a Paceline peer")
        end = _HEADER.size + size
        if len(self._received) < end:
            return None
        body = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        try:
            message = json.loads(body)
        except ValueError as error:
            raise PeerClosedError(f"not a message: {error}") from error
        if not isinstance(message, dict):
            raise PeerClosedError("not a message")
        return message

    def receive(self, deadline: Deadline, what: str, rank: int) -> dict[str, Any]:
        while (message := self.poll()) is None:
            deadline.check(what, rank)
            _ready([self.sock], select.POLLIN, min(POLL_S, deadline.left_s()))
        return message


class Rendezvous:
    """This process's listening socket, and the callers that have come so far."""

    def __init__(self, host: str) -> None:
        try:
            self._listener = self._listen(host)
        except OSError as error:
            raise TransportError(f"cannot listen on {host}: {error}") from error
        self._listener.setblocking(False)
        self._unread: list[PeerConnection] = []
        self._waiting: dict[str, tuple[dict[str, Any], PeerConnection]] = {}

    def _listen(self, host: str) -> socket.socket:
        return socket.create_server((host, 0), backlog=LISTEN_BACKLOG)

    def _target(self, address: str) -> tuple[socket.socket, Any]:
        """A socket, and what to connect it to."""
        host, _, port = address.rpartition(":")
        return socket.socket(), (host, int(port))

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def close(self) -> None:
        self._listener.close()
        for connection in [
            *self._unread,
            *(connection for _, connection in self._waiting.values()),
        ]:
            connection.close()
        self._unread.clear()
        self._waiting.clear()

    def dial(
        self, group: Group, rank: int, hello: dict[str, Any], deadline: Deadline
    ) -> tuple[dict[str, Any], PeerConnection]:
        """Call `rank` until it answers for this generation; its answer, and the connection."""
        peer = group.peers[rank]
        what = f"waiting for rank {rank} ({peer.name}) at {peer.address}"
        own = group.peers[group.rank].name
        hello = {**hello, "key": group.key, "number": group.number, "from": own}
        while True:
            connection = self._call(peer, what, rank, deadline)
            if connection is not None:
                try:
                    connection.send(hello)
                    return connection.receive(deadline, what, rank), connection
                except PeerClosedError:
                    connection.close()  # it is in another generation, or restarting: try again
                except TransportError:
                    connection.close()
                    raise
            deadline.pause(REDIAL_S, what, rank)

    def _call(self, peer: Peer, what: str, rank: int, deadline: Deadline) -> PeerConnection | None:
        try:
            sock, target = self._target(peer.address)
        except OSError as error:
            raise TransportError(f"no socket for a call: {error}; {MORE_FILES}") from error
        sock.setblocking(False)
        try:
            sock.connect_ex(target)
            while not _ready([sock], select.POLLOUT, POLL_S):
                deadline.check(what, rank)
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                return PeerConnection(sock)
        except OSError:
            pass  # an unknown host or a refused call: the same as nobody there yet
        except TransportError:
            sock.close()
            raise
        sock.close()
        return None

    def answer(
        self, group: Group, rank: int, deadline: Deadline
    ) -> tuple[dict[str, Any], PeerConnection]:
        """Wait until `rank` calls for this generation; returns its hello and the connection."""
        name = group.peers[rank].name
        what = f"waiting for a call of rank {rank} ({name})"
        while True:
            self._collect(STRANGERS_MAX + group.size)
            found = self._waiting.get(name)
            if found is not None and found[0].get("key") == group.key:
                return self._waiting.pop(name)
            if found is not None and int(found[0].get("number", 0)) <= group.number:
                self._waiting.pop(name)[1].close()  # of a generation that is over: it may redial
            deadline.check(what, rank)
            _ready([self._listener, *self._unread], select.POLLIN, min(POLL_S, deadline.left_s()))

    def _collect(self, unread_max: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # the caller is still there
                    raise TransportError(f"no socket for a caller: {error}; {MORE_FILES}") from None
                continue  # the caller left again before we looked
            self._unread.append(PeerConnection(sock))
        while len(self._unread) > unread_max:
            self._unread.pop(0).close()
        for connection in list(self._unread):
            try:
                hello = connection.poll()
            except PeerClosedError:
                hello = {}
            if hello is None:
                continue
            self._unread.remove(connection)
            name = hello.get("from")
            if not isinstance(name, str) or not isinstance(hello.get("number"), int):
                connection.close()
                continue
            if name in self._waiting:
                self._waiting.pop(name)[1].close()
            self._waiting[name] = (hello, connection)


def _ready(sockets: Sequence[_Descriptor], events: int, timeout_s: float) -> bool:
    """Wait for one of them; poll knows no highest number of a descriptor, as select does."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock.fileno(), events)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def readable(sock: _Descriptor, timeout_s: float) -> bool:
    """Wait until something can be read from it."""
    return _ready([sock], select.POLLIN, timeout_s)


class PeerConnections:
    """The open connections of one group; tells which peer has gone."""

    def __init__(self) -> None:
        self._rank_of: dict[int, int] = {}
        self._connections: list[PeerConnection] = []
        self._poll = select.poll()

    def add(self, rank: int, connection: PeerConnection) -> None:
        self._rank_of[connection.fileno()] = rank
        self._connections.append(connection)
        self._poll.register(connection.fileno(), CLOSED)

    def watched(self) -> list[tuple[int, int, int]]:
        """For each: its file descriptor, the rank at its other end, the events to poll for."""
        return [
            (connection.fileno(), self._rank_of[connection.fileno()], CLOSED)
            for connection in self._connections
        ]

    def lost(self) -> int | None:
        """A rank whose connection has closed, else None."""
        events = self._poll.poll(0)
        return self._rank_of[events[0][0]] if events else None

    def say_goodbye(self) -> None:
        """Let the peers know that we have left, and go on listening for when they do."""
        for connection in self._connections:
            connection.end_sending()

    def all_lost(self) -> bool:
        """Nobody at the other ends is in the group any more."""
        for fd, events in self._poll.poll(0):
            if events:
                self._poll.unregister(fd)
                del self._rank_of[fd]
        if not self._rank_of:
            self.close()
        return not self._connections

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._rank_of.clear()
        self._poll = select.poll()
