"""Where two ranks meet before they move data: one TCP connection per pair and generation.

A link of MPI can only be made when both sides stand ready at the same moment: Accept and Connect
hold the lock of the whole library while they wait. So the pair meets over a plain socket first. The
lower rank dials, says which generation it is wiring, and both agree on what follows; an absent or
stopped peer is noticed here, where every wait has an abort flag and a deadline.

The socket then stays open as long as the group. No data goes over it: the kernel of a dead peer
closes it, so a reduction learns of the death without asking anybody.

There is no listening thread. Between two generations, callers wait in the kernel's backlog.

Anybody who reaches the socket can call, so nothing of a caller is parsed before it has proved that
it knows the job's token. The listener greets it with a nonce, the caller answers with its own, and
both derive the key of this connection from the two nonces and the token. Each message carries a
MAC (HMAC-SHA256) with that key, its direction and its number, so a message that was recorded is
worth nothing on another connection, and the caller knows that it has reached its peer. A caller
that fails is closed and counted (`paceline.refusals`), and the rank goes on waiting for its peer.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
from paceline_api.decoding import UNDECODABLE

from paceline.clock import NS_PER_MS, NS_PER_S, now_ns
from paceline.limits import LISTEN_BACKLOG, MORE_FILES
from paceline.refusals import Entry, Reason, refuse
from paceline.transport.base import Abort, Group, Peer, PeerLost, TransportAborted, TransportError

FRAME_BYTES_MAX: Final = 1 << 20
"""Of one message between peers that know each other. What grows with the group is sent in several.
"""
HELLO_BYTES_MAX: Final = 4096
"""Of the first message of a caller. No more than that is kept for one that has proved nothing."""
HELLO_NS: Final = 5 * NS_PER_S
"""From the accept to the last byte of the hello. A peer that was stopped meanwhile calls again."""
SEND_NS: Final = NS_PER_S
STRANGERS_MAX: Final = 512
"""Callers that have not proved who they are, beside one for each rank of the group; programs that
look for open ports do that."""
ACCEPTS_MAX: Final = 64
"""Before those that were accepted are read: a flood may not crowd out a caller that answers."""
GREETING: Final = b"paceline rendezvous 1\n"
NONCE_BYTES: Final = 32
MAC_BYTES: Final = hashlib.sha256().digest_size
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
_HEADER: Final = struct.Struct(f"!I{MAC_BYTES}s")
_COUNTED: Final = struct.Struct("!BQ")
_CALLER: Final = 0
_LISTENER: Final = 1

T = TypeVar("T", bound=msgspec.Struct)


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


class PeerRefusedError(PeerClosedError):
    """This end will not go on with the other one. It is counted where it is raised."""

    def __init__(self, reason: Reason, who: str) -> None:
        super().__init__(f"refused a message of {who}: {reason}")
        refuse(Entry.RENDEZVOUS, reason, who)


class Hello(msgspec.Struct, frozen=True):
    """The first message of a caller."""

    generation: str
    """`Group.key`."""
    number: int
    """`Group.number`."""
    sender: str
    """`Peer.name` of the caller."""
    to: str
    """`Peer.name` of the rank that it means to call."""
    offer: msgspec.Raw
    """What the kind of data channel needs, a struct of its own."""


def secret_of(token: str) -> bytes:
    """Return what only processes that know the job's token know, for `Group.secret`."""
    return hmac.digest(token.encode(), b"paceline rendezvous", "sha256")


class PeerConnection:
    """One connection that carries short messages, each with a MAC once both ends have met."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        """`who`: the other end as the kernel knows it, for the log."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The machine of a peer may vanish without a word: ask it now and then.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.sock, self.who = sock, who
        self.since_ns = now_ns()
        self._received = bytearray()
        self._key = b""
        self._own, self._others = _LISTENER, _CALLER
        self._sent = self._taken = 0
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def has_begun(self) -> bool:
        """The other end has sent a part of a message."""
        return bool(self._key or self._received)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def end_sending(self) -> None:
        with suppress(OSError):  # the other end has closed already
            self.sock.shutdown(socket.SHUT_WR)

    # ---- the rendezvous -------------------------------------------------------------------

    def greet(self) -> None:
        """Send the nonce that a caller has to answer. Raises PeerClosedError."""
        self._write(GREETING + self._nonce)

    def poll_hello(self, secret: bytes) -> Hello | None:
        """Return the caller's hello if it is all here. Nothing of it is parsed before its MAC was
        checked. Raises PeerClosedError."""
        if not self._key:
            nonce = self._take(NONCE_BYTES)
            if nonce is None:
                return None
            self._key = _session_key(secret, self._nonce, nonce)
        return self.poll(Hello, HELLO_BYTES_MAX)

    def call(self, secret: bytes, hello: Hello, deadline: Deadline, what: str, rank: int) -> None:
        """Wait for the listener's greeting and answer it. Raises PeerClosedError."""
        while (greeting := self._take(len(GREETING) + NONCE_BYTES)) is None:
            self._wait(deadline, what, rank)
        if not greeting.startswith(GREETING):
            raise PeerRefusedError(Reason.MALFORMED, self.who)
        self._own, self._others = _CALLER, _LISTENER
        self._key = _session_key(secret, greeting[len(GREETING) :], self._nonce)
        self._write(self._nonce)
        self.send(hello)

    # ---- messages -------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, deadline: Deadline | None = None) -> None:
        """Send one message.

        Args:
            message: What `receive` of the other end names as its kind.
            deadline: How long to wait for an end that does not read yet; else SEND_NS.

        Raises:
            PeerClosedError: The other end has gone, or does not read.
            TransportError: The deadline is over or the abort flag is raised.
        """
        body = msgspec.msgpack.encode(message)
        assert len(body) <= FRAME_BYTES_MAX, len(body)
        mac = self._mac(self._own, self._sent, body)
        self._sent += 1
        self._write(_HEADER.pack(len(body), mac) + body, deadline)

    def poll(self, kind: type[T], bytes_max: int = FRAME_BYTES_MAX) -> T | None:
        """Return the next message if it is all here. Raises PeerClosedError when the peer has left
        or sends what is no such message of the peer."""
        if not self._fill(_HEADER.size):
            return None
        size, mac = _HEADER.unpack_from(self._received)
        if size > bytes_max:
            raise PeerRefusedError(Reason.TOO_LARGE, self.who)
        frame = self._take(_HEADER.size + size)
        if frame is None:
            return None
        body = frame[_HEADER.size :]
        if not hmac.compare_digest(mac, self._mac(self._others, self._taken, body)):
            raise PeerRefusedError(Reason.UNAUTHENTICATED, self.who)
        self._taken += 1
        return self.decode(body, kind)

    def decode(self, body: bytes | msgspec.Raw, kind: type[T]) -> T:
        """Return a message, or a part of one, as its kind. Raises PeerClosedError."""
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UNDECODABLE:
            raise PeerRefusedError(Reason.MALFORMED, self.who) from None

    def receive(self, kind: type[T], deadline: Deadline, what: str, rank: int) -> T:
        """Wait for the next message. Raises PeerClosedError, and TransportError in the end."""
        while (message := self.poll(kind)) is None:
            self._wait(deadline, what, rank)
        return message

    # ---- bytes ----------------------------------------------------------------------------

    def _mac(self, direction: int, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, _COUNTED.pack(direction, number) + body, "sha256")

    def _wait(self, deadline: Deadline, what: str, rank: int) -> None:
        deadline.check(what, rank)
        _ready([self.sock], select.POLLIN, min(POLL_S, deadline.left_s()))

    def _write(self, data: bytes, deadline: Deadline | None = None) -> None:
        left = memoryview(data)
        end_ns = now_ns() + SEND_NS
        while left:
            try:
                left = left[self.sock.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                # The buffers of the socket are full, so the peer does not read; seldom and short.
                if deadline is not None:
                    deadline.check(f"sending to {self.who}")
                elif now_ns() > end_ns:
                    raise PeerClosedError("the peer does not read") from None
                _ready([self.sock], select.POLLOUT, POLL_S)
            except OSError as error:
                raise PeerClosedError(str(error)) from error

    def _fill(self, count: int) -> bool:
        """Return True if so many bytes are here. Never reads beyond them: what follows may come
        with descriptors, and a stranger fills no more memory than the message that is awaited."""
        while (missing := count - len(self._received)) > 0:
            try:
                data = self.sock.recv(min(missing, 1 << 16))
            except BlockingIOError:
                return False
            except OSError as error:
                raise PeerClosedError(str(error)) from error
            if not data:
                raise PeerClosedError("connection closed")
            self._received += data
        return True

    def _take(self, count: int) -> bytes | None:
        if not self._fill(count):
            return None
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken


def _session_key(secret: bytes, of_listener: bytes, of_caller: bytes) -> bytes:
    return hmac.digest(secret, of_listener + of_caller, "sha256")


class Rendezvous:
    """This process's listening socket, and the callers that have come so far."""

    def __init__(self, host: str) -> None:
        try:
            self._listener = self._listen(host)
        except OSError as error:
            raise TransportError(f"cannot listen on {host}: {error}") from error
        self._listener.setblocking(False)
        self._strangers: list[PeerConnection] = []
        """In the order of their calls; they have proved nothing yet."""
        self._waiting: dict[str, tuple[Hello, PeerConnection]] = {}
        """By name: peers that have proved who they are."""

    def _listen(self, host: str) -> socket.socket:
        return socket.create_server((host, 0), backlog=LISTEN_BACKLOG)

    def _target(self, address: str) -> tuple[socket.socket, Any]:
        """A socket, and what to connect it to."""
        host, _, port = address.rpartition(":")
        return socket.socket(), (host, int(port))

    def _admit(self, sock: socket.socket) -> str:
        """Return who is at the other end of a new connection. Raises PeerRefusedError if it cannot
        be a peer, before anything of it is read, and OSError if it has left again."""
        host, port = sock.getpeername()[:2]
        return f"{host}:{port}"

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def close(self) -> None:
        self._listener.close()
        for connection in [
            *self._strangers,
            *(connection for _, connection in self._waiting.values()),
        ]:
            connection.close()
        self._strangers.clear()
        self._waiting.clear()

    def dial(
        self, group: Group, rank: int, offer: msgspec.Struct, kind: type[T], deadline: Deadline
    ) -> tuple[T, PeerConnection]:
        """Call `rank` until it answers for this generation.

        Args:
            group: The generation that is being wired.
            rank: Index of the peer in the group.
            offer: What the data channel says in the first message.
            kind: What the peer answers with.
            deadline: When to give up.

        Returns:
            Its answer, and the connection.

        Raises:
            TransportError: It does not answer in time, or the abort flag is raised.
        """
        peer = group.peers[rank]
        what = f"waiting for rank {rank} ({peer.name}) at {peer.address}"
        own = group.peers[group.rank].name
        packed = msgspec.Raw(msgspec.msgpack.encode(offer))
        hello = Hello(group.key, group.number, own, peer.name, packed)
        while True:
            connection = self._call(peer, what, rank, deadline)
            if connection is not None:
                try:
                    connection.call(group.secret, hello, deadline, what, rank)
                    return connection.receive(kind, deadline, what, rank), connection
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
            begun = sock.connect_ex(target)  # EAGAIN: too many others call this local socket
            while begun == errno.EINPROGRESS and not _ready([sock], select.POLLOUT, POLL_S):
                deadline.check(what, rank)
            if begun in (0, errno.EINPROGRESS) and _error_of(sock) == 0:
                return PeerConnection(sock, self._admit(sock))
        except (OSError, PeerRefusedError):
            pass  # an unknown host, a refused call or somebody else: as if nobody were there yet
        except TransportError:
            sock.close()
            raise
        sock.close()
        return None

    def answer(
        self, group: Group, rank: int, kind: type[T], deadline: Deadline
    ) -> tuple[T, PeerConnection]:
        """Wait until `rank` calls for this generation.

        Args:
            group: The generation that is being wired.
            rank: Index of the peer in the group.
            kind: What the peer offers in its hello.
            deadline: When to give up.

        Returns:
            Its offer, and the connection.

        Raises:
            TransportError: It does not call in time, or the abort flag is raised.
        """
        name = group.peers[rank].name
        what = f"waiting for a call of rank {rank} ({name})"
        while True:
            self._collect(group)
            if name in self._waiting:
                hello, connection = self._waiting[name]
                if hello.generation == group.key:
                    del self._waiting[name]
                    with suppress(PeerClosedError):
                        return connection.decode(hello.offer, kind), connection
                    connection.close()
                elif hello.number <= group.number:
                    del self._waiting[name]
                    connection.close()  # of a generation that is over: it may redial
            deadline.check(what, rank)
            callers: list[_Descriptor] = [self._listener, *self._strangers]
            _ready(callers, select.POLLIN, min(POLL_S, deadline.left_s()))

    def _collect(self, group: Group) -> None:
        """Accept callers, and read the hellos of those that have been accepted."""
        bound = STRANGERS_MAX + group.size
        self._accept()
        while len(self._strangers) > bound:
            self._refuse(self._strangers[0], Reason.TOO_MANY)
        own = group.peers[group.rank].name
        for stranger in list(self._strangers):
            try:
                hello = stranger.poll_hello(group.secret)
            except PeerRefusedError:
                self._let_go(stranger)
                continue
            except PeerClosedError:
                if stranger.has_begun:
                    refuse(Entry.RENDEZVOUS, Reason.MALFORMED, stranger.who)
                self._let_go(stranger)  # having said nothing, as one that was stopped does
                continue
            if hello is None:
                if now_ns() - stranger.since_ns > HELLO_NS:
                    self._refuse(stranger, Reason.TOO_SLOW)
            elif hello.to != own:
                self._refuse(stranger, Reason.UNKNOWN_PEER)
            else:
                self._strangers.remove(stranger)
                self._keep(hello, stranger, bound)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # the caller left again before we looked
                if not self._strangers:  # the caller is still there
                    raise TransportError(f"no socket for a caller: {error}; {MORE_FILES}") from None
                self._refuse(self._strangers[0], Reason.TOO_MANY)
                continue
            try:
                stranger = PeerConnection(sock, self._admit(sock))
                stranger.greet()
            except (OSError, PeerClosedError):
                sock.close()
                continue
            self._strangers.append(stranger)

    def _refuse(self, stranger: PeerConnection, reason: Reason) -> None:
        refuse(Entry.RENDEZVOUS, reason, stranger.who)
        self._let_go(stranger)

    def _let_go(self, stranger: PeerConnection) -> None:
        self._strangers.remove(stranger)
        stranger.close()

    def _keep(self, hello: Hello, connection: PeerConnection, bound: int) -> None:
        """Keep a caller until it is its turn. The newest call of a peer counts."""
        if hello.sender in self._waiting:
            self._waiting.pop(hello.sender)[1].close()
        elif len(self._waiting) >= bound:
            self._waiting.pop(next(iter(self._waiting)))[1].close()
        self._waiting[hello.sender] = hello, connection


def _error_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


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
