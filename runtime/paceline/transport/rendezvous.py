"""The rendezvous of two ranks before they move data: one TCP connection per pair and generation.

A link of MPI can only be made when both sides are ready at the same moment, since Accept and
Connect hold the lock of the whole library while they wait. So the pair meets over a plain socket
first. The lower rank dials and names the generation that it is wiring, and both agree on what
follows. An absent or stopped peer is noticed here, where every wait has an abort flag and a
deadline.

The socket then stays open as long as the group. No data goes over it. The kernel of a dead peer
closes it, so a reduction notices the death without asking anybody.

There is no listening thread. Between two generations, callers wait in the kernel's backlog.

Anybody who reaches the socket can call, so nothing of a caller is parsed before it has proved that
it knows the job's token. The listener greets it with a nonce, the caller answers with a nonce of
its own, and both derive the key of this connection from the two nonces and the token. Each message
carries a MAC (HMAC-SHA256) over its direction, its number and its body. So a recorded message is
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
from paceline_api.times import NS_PER_MS, NS_PER_S

from paceline.clock import now_ns
from paceline.limits import LISTEN_BACKLOG, MORE_FILES
from paceline.refusals import Entry, RefusalReason, refuse
from paceline.transport.base import Abort, Group, Peer, PeerLost, TransportAborted, TransportError

FRAME_BYTES_MAX: Final = 1 << 20
"""Size limit of one message between authenticated peers, in bytes. Data that grows with the group
is sent in several messages."""
HELLO_BYTES_MAX: Final = 4096
"""Size limit of a caller's first message, in bytes. No more is stored for an unauthenticated
caller."""
HELLO_NS: Final = 5 * NS_PER_S
"""Longest time from the accept to the last byte of the hello. A peer that was stopped meanwhile
calls again."""
SEND_NS: Final = NS_PER_S
STRANGERS_MAX: Final = 512
"""Number of unauthenticated callers that may wait, besides one for each rank of the group. Port
scanners are such callers."""
ACCEPTS_MAX: Final = 64
"""Number of callers accepted before the accepted ones are read, so that a flood cannot crowd out a
caller that answers."""
GREETING: Final = b"paceline rendezvous 1\n"
NONCE_BYTES: Final = 32
MAC_BYTES: Final = hashlib.sha256().digest_size
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that the kernel draws at each boot. It is the same in all containers of a
machine."""
POLL_S: Final = 0.01
REDIAL_S: Final = 0.05
LAST_WORDS_NS: Final = 100 * NS_PER_MS
"""Time in which a reduction may still complete after a peer has closed its connection. A peer that
has finished its part may leave the group before this rank has read all that it sent."""
KEEPALIVE: Final = {
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 6,
}
"""TCP keepalive options. A connection to a machine that is gone closes after 45 s without an answer
of its kernel."""
CLOSED: Final = select.POLLIN | select.POLLRDHUP
"""Poll events of a closed connection. Nobody writes on a connection after the rendezvous."""
_HEADER: Final = struct.Struct(f"!I{MAC_BYTES}s")
_COUNTED: Final = struct.Struct("!BQ")
_CALLER: Final = 0
_LISTENER: Final = 1

T = TypeVar("T", bound=msgspec.Struct)


class _Descriptor(Protocol):
    def fileno(self) -> int: ...


class Deadline:
    """Time at which a blocking call must give up, and the flag that makes it give up earlier."""

    def __init__(self, abort: Abort, timeout_s: float) -> None:
        self.abort = abort
        self.timeout_s = timeout_s
        self._end_ns = now_ns() + timeout_s * NS_PER_S

    def left_s(self) -> float:
        """Return the seconds that are left. Negative once the deadline has passed."""
        return (self._end_ns - now_ns()) / NS_PER_S

    def check(self, what: str, rank: int | None = None) -> None:
        """Raise an error if the call must end.

        Args:
            what: What the caller is doing, for the error message.
            rank: Index of the peer that is waited for, if there is one.

        Raises:
            TransportAborted: The abort flag is raised.
            PeerLost: The deadline has passed.
        """
        if self.abort.is_raised():
            raise TransportAborted(f"abandoned while {what}")
        if now_ns() >= self._end_ns:
            raise PeerLost(f"no answer within {self.timeout_s:g} s while {what}", rank)

    def pause(self, seconds: float, what: str, rank: int | None = None) -> None:
        """Sleep until the abort object wakes the thread, the time is over or the deadline passes.

        It raises the errors of `check` if the call must end before the sleep.

        Args:
            seconds: Longest sleep.
            what: What the caller is doing, for the error message.
            rank: Index of the peer that is waited for, if there is one.
        """
        self.check(what, rank)
        self.abort.wait(max(0.0, min(seconds, self.left_s())))


class PeerClosedError(Exception):
    """Raised when the other end has closed or broken the connection."""


class PeerRefusedError(PeerClosedError):
    """Raised when this end refuses to go on with the other one. Raising it counts the refusal."""

    def __init__(self, reason: RefusalReason, who: str) -> None:
        super().__init__(f"refused a message of {who}: {reason}")
        refuse(Entry.RENDEZVOUS, reason, who)


class Hello(msgspec.Struct, frozen=True):
    """The first message of a caller."""

    generation: str
    """`Group.key` of the caller."""
    number: int
    """`Group.number` of the caller."""
    sender: str
    """`Peer.name` of the caller."""
    to: str
    """`Peer.name` of the rank that the caller wants to reach."""
    offer: msgspec.Raw
    """Data for the kind of data channel, encoded as a struct of its own."""


def secret_of(token: str) -> bytes:
    """Derive the shared secret of a job's processes (`Group.secret`) from the job's token."""
    return hmac.digest(token.encode(), b"paceline rendezvous", "sha256")


class PeerConnection:
    """A connection for short messages.

    Each message carries a MAC once both ends have exchanged nonces.
    """

    def __init__(self, sock: socket.socket, who: str) -> None:
        """Take over a connected socket.

        Args:
            sock: The socket. It is set to non-blocking.
            who: The other end as the kernel reports it, for the log.
        """
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer's machine may vanish without closing the connection: probe it.
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
        """Return True if the other end has sent a part of a message."""
        return bool(self._key or self._received)

    def fileno(self) -> int:
        """Return the descriptor, so that the connection can be polled."""
        return self.sock.fileno()

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def end_sending(self) -> None:
        """Let the other end see that nothing more comes. This end can still poll for its close."""
        with suppress(OSError):  # the other end has closed already
            self.sock.shutdown(socket.SHUT_WR)

    # ---- the rendezvous -------------------------------------------------------------------

    def greet(self) -> None:
        """Send the nonce that a caller has to answer. Raise PeerClosedError if it has left."""
        self._write(GREETING + self._nonce)

    def poll_hello(self, secret: bytes) -> Hello | None:
        """Return the caller's hello if it has arrived completely. Do not block.

        Nothing of it is parsed before its MAC was checked. It raises PeerClosedError if the caller
        has left or has failed the check.

        Args:
            secret: `Group.secret` of this job.

        Returns:
            The hello, or None if a part is missing.
        """
        if not self._key:
            nonce = self._take(NONCE_BYTES)
            if nonce is None:
                return None
            self._key = _session_key(secret, self._nonce, nonce)
        return self.poll(Hello, HELLO_BYTES_MAX)

    def call(self, secret: bytes, hello: Hello, deadline: Deadline, what: str, rank: int) -> None:
        """Wait for the listener's greeting and answer it with a hello.

        It raises PeerClosedError if the listener has left.

        Args:
            secret: `Group.secret` of this job.
            hello: The message to send.
            deadline: When to give up.
            what: What the caller is doing, for error messages.
            rank: Index of the peer, for error messages.

        Raises:
            PeerRefusedError: The listener does not send the greeting of this protocol.
        """
        while (greeting := self._take(len(GREETING) + NONCE_BYTES)) is None:
            self._wait(deadline, what, rank)
        if not greeting.startswith(GREETING):
            raise PeerRefusedError(RefusalReason.MALFORMED, self.who)
        self._own, self._others = _CALLER, _LISTENER
        self._key = _session_key(secret, greeting[len(GREETING) :], self._nonce)
        self._write(self._nonce)
        self.send(hello)

    # ---- messages -------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, deadline: Deadline | None = None) -> None:
        """Send one message.

        It raises PeerClosedError if the other end has gone or does not read, and TransportError if
        the deadline has passed or the abort flag is raised.

        Args:
            message: A struct of the kind that the other end passes to `receive`.
            deadline: How long to wait for an end that does not read yet; SEND_NS if None.
        """
        body = msgspec.msgpack.encode(message)
        assert len(body) <= FRAME_BYTES_MAX, len(body)
        mac = self._mac(self._own, self._sent, body)
        self._sent += 1
        self._write(_HEADER.pack(len(body), mac) + body, deadline)

    def poll(self, kind: type[T], bytes_max: int = FRAME_BYTES_MAX) -> T | None:
        """Return the next message if it has arrived completely. Do not block.

        It raises PeerClosedError if the peer has left.

        Args:
            kind: Type of the expected message.
            bytes_max: Size limit of the message body.

        Returns:
            The message, or None if a part is missing.

        Raises:
            PeerRefusedError: The bytes are too long, unauthenticated, or not of this kind.
        """
        if not self._fill(_HEADER.size):
            return None
        size, mac = _HEADER.unpack_from(self._received)
        if size > bytes_max:
            raise PeerRefusedError(RefusalReason.TOO_LARGE, self.who)
        frame = self._take(_HEADER.size + size)
        if frame is None:
            return None
        body = frame[_HEADER.size :]
        if not hmac.compare_digest(mac, self._mac(self._others, self._taken, body)):
            raise PeerRefusedError(RefusalReason.UNAUTHENTICATED, self.who)
        self._taken += 1
        return self.decode(body, kind)

    def decode(self, body: bytes | msgspec.Raw, kind: type[T]) -> T:
        """Decode a message, or a part of one.

        Args:
            body: The encoded bytes.
            kind: Type of the result.

        Returns:
            The decoded struct.

        Raises:
            PeerRefusedError: The bytes do not encode such a struct.
        """
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UNDECODABLE:
            raise PeerRefusedError(RefusalReason.MALFORMED, self.who) from None

    def receive(self, kind: type[T], deadline: Deadline, what: str, rank: int) -> T:
        """Wait for the next message.

        It raises PeerClosedError if the peer has left, and TransportError if the deadline has
        passed or the abort flag is raised.

        Args:
            kind: Type of the expected message.
            deadline: When to give up.
            what: What the caller is doing, for error messages.
            rank: Index of the peer, for error messages.

        Returns:
            The message.
        """
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
                # The socket's buffers are full, so the peer does not read. Rare and short.
                if deadline is not None:
                    deadline.check(f"sending to {self.who}")
                elif now_ns() > end_ns:
                    raise PeerClosedError("the peer does not read") from None
                _ready([self.sock], select.POLLOUT, POLL_S)
            except OSError as error:
                raise PeerClosedError(str(error)) from error

    def _fill(self, count: int) -> bool:
        """Return True if at least `count` bytes are buffered.

        It never reads beyond them: descriptors may come with the bytes that follow, and a stranger
        must not fill more memory than the expected message needs.

        Args:
            count: Number of bytes wanted.

        Returns:
            False if more bytes have to arrive.

        Raises:
            PeerClosedError: The other end has closed the connection.
        """
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
    """This process's listening socket, and the callers that have arrived so far."""

    def __init__(self, host: str) -> None:
        try:
            self._listener = self._listen(host)
        except OSError as error:
            raise TransportError(f"cannot listen on {host}: {error}") from error
        self._listener.setblocking(False)
        self._strangers: list[PeerConnection] = []
        """Unauthenticated callers, in the order of their calls."""
        self._waiting: dict[str, tuple[Hello, PeerConnection]] = {}
        """Authenticated peers by name, with their hellos."""

    def _listen(self, host: str) -> socket.socket:
        return socket.create_server((host, 0), backlog=LISTEN_BACKLOG)

    def _target(self, address: str) -> tuple[socket.socket, Any]:
        """Return a new socket and the target to connect it to."""
        host, _, port = address.rpartition(":")
        return socket.socket(), (host, int(port))

    def _admit(self, sock: socket.socket) -> str:
        """Return who is at the other end of a new connection, before anything of it is read.

        A subclass raises PeerRefusedError if it cannot be a peer. It raises OSError if it has left
        again.

        Args:
            sock: The connected socket.

        Returns:
            Text for the log.
        """
        host, port = sock.getpeername()[:2]
        return f"{host}:{port}"

    @property
    def address(self) -> str:
        """Where peers reach the listener, as HOST:PORT."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def close(self) -> None:
        """Close the listener and all connections that nobody has taken over."""
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
        """Call a rank until it answers for this generation.

        Args:
            group: The generation that is being wired.
            rank: Index of the peer in the group.
            offer: First message of the data channel.
            kind: Type of the peer's answer.
            deadline: When to give up.

        Returns:
            The answer, and the connection, which the caller owns from now on.

        Raises:
            TransportError: The peer does not answer in time, or the abort flag is raised.
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
                    connection.close()  # the peer is in another generation or restarts: retry
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
            pass  # unknown host, refused call or a stranger: retry, as if nobody listened yet
        except TransportError:
            sock.close()
            raise
        sock.close()
        return None

    def answer(
        self, group: Group, rank: int, kind: type[T], deadline: Deadline
    ) -> tuple[T, PeerConnection]:
        """Wait until a rank calls for this generation.

        It raises TransportError if the rank does not call in time or the abort flag is raised.

        Args:
            group: The generation that is being wired.
            rank: Index of the peer in the group.
            kind: Type of the peer's offer.
            deadline: When to give up.

        Returns:
            The offer, and the connection, which the caller owns from now on.
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
                    connection.close()  # its generation is over; it may dial again
            deadline.check(what, rank)
            callers: list[_Descriptor] = [self._listener, *self._strangers]
            _ready(callers, select.POLLIN, min(POLL_S, deadline.left_s()))

    def _collect(self, group: Group) -> None:
        """Accept callers, and read the hellos of those that have been accepted."""
        bound = STRANGERS_MAX + group.size
        self._accept()
        while len(self._strangers) > bound:
            self._refuse(self._strangers[0], RefusalReason.TOO_MANY)
        own = group.peers[group.rank].name
        for stranger in list(self._strangers):
            try:
                hello = stranger.poll_hello(group.secret)
            except PeerRefusedError:
                self._let_go(stranger)
                continue
            except PeerClosedError:
                if stranger.has_begun:
                    refuse(Entry.RENDEZVOUS, RefusalReason.MALFORMED, stranger.who)
                self._let_go(stranger)  # a stopped peer may leave without sending anything
                continue
            if hello is None:
                if now_ns() - stranger.since_ns > HELLO_NS:
                    self._refuse(stranger, RefusalReason.TOO_SLOW)
            elif hello.to != own:
                self._refuse(stranger, RefusalReason.UNKNOWN_PEER)
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
                    continue  # the caller left before it was accepted
                if not self._strangers:  # no stranger to close: the caller keeps waiting
                    raise TransportError(f"no socket for a caller: {error}; {MORE_FILES}") from None
                self._refuse(self._strangers[0], RefusalReason.TOO_MANY)
                continue
            try:
                stranger = PeerConnection(sock, self._admit(sock))
                stranger.greet()
            except (OSError, PeerClosedError):
                sock.close()
                continue
            self._strangers.append(stranger)

    def _refuse(self, stranger: PeerConnection, reason: RefusalReason) -> None:
        refuse(Entry.RENDEZVOUS, reason, stranger.who)
        self._let_go(stranger)

    def _let_go(self, stranger: PeerConnection) -> None:
        self._strangers.remove(stranger)
        stranger.close()

    def _keep(self, hello: Hello, connection: PeerConnection, bound: int) -> None:
        """Keep an authenticated caller until its rank is waited for.

        A newer call replaces an older one.
        """
        if hello.sender in self._waiting:
            self._waiting.pop(hello.sender)[1].close()
        elif len(self._waiting) >= bound:
            self._waiting.pop(next(iter(self._waiting)))[1].close()
        self._waiting[hello.sender] = hello, connection


def _error_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _ready(sockets: Sequence[_Descriptor], events: int, timeout_s: float) -> bool:
    """Return True if poll reports one of the sockets in time.

    Unlike select, it takes any descriptor.
    """
    poll = select.poll()
    for sock in sockets:
        poll.register(sock.fileno(), events)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def readable(sock: _Descriptor, timeout_s: float) -> bool:
    """Return True if something can be read from the socket within `timeout_s` seconds."""
    return _ready([sock], select.POLLIN, timeout_s)


class PeerConnections:
    """The open connections of one group. They show which peer has gone."""

    def __init__(self) -> None:
        self._rank_of: dict[int, int] = {}
        self._connections: list[PeerConnection] = []
        self._poll = select.poll()

    def add(self, rank: int, connection: PeerConnection) -> None:
        """Take over the connection to a rank and watch it."""
        self._rank_of[connection.fileno()] = rank
        self._connections.append(connection)
        self._poll.register(connection.fileno(), CLOSED)

    def watched(self) -> list[tuple[int, int, int]]:
        """Return each connection's descriptor, the rank at the other end, and the poll events."""
        return [
            (connection.fileno(), self._rank_of[connection.fileno()], CLOSED)
            for connection in self._connections
        ]

    def lost(self) -> int | None:
        """Return a rank whose connection has closed, or None."""
        events = self._poll.poll(0)
        return self._rank_of[events[0][0]] if events else None

    def say_goodbye(self) -> None:
        """Show the peers that this rank has left.

        Its ends stay open to notice when the peers leave.
        """
        for connection in self._connections:
            connection.end_sending()

    def all_lost(self) -> bool:
        """Return True if nobody at the other ends is in the group any more."""
        for fd, events in self._poll.poll(0):
            if events:
                self._poll.unregister(fd)
                del self._rank_of[fd]
        if not self._rank_of:
            self.close()
        return not self._connections

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._rank_of.clear()
        self._poll = select.poll()
