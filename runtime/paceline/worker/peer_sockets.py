"""Messages between ranks: announcements, GO and repairs (docs/design/control-channel.md).

Each rank binds two sockets. The fast lane carries announcements and GO. The bulk lane carries
states and missing parts, so that a hundred megabytes for a joiner never delay a GO. Messages are in
order per pair of ranks and lane. Waiting is done in the kernel; `wake` ends a wait from any thread.

On the bulk lane a message goes first, and each piece of its payload follows as a message of zmq of
its own, since zmq shows a message only when all of it has arrived. So the receiver puts a state
together while it arrives, in the memory in which it is loaded.

Everything is sent in frames of at most PIECE_BYTES, and no socket takes a larger one. So a stranger
that has not shown the job's key yet makes a rank hold no more than that per connection. Only the
bulk lane over a socket file, which the kernel closes to other users, takes frames of
LOCAL_PIECE_BYTES. Bytes that are not a message are dropped and counted
(`paceline.refusals`), and the job goes on.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import zmq
import zmq.utils.garbage  # noqa: F401 (here, so that its exit handler runs after the engine's)
from paceline_api.decoding import UNDECODABLE
from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_MS
from zmq.utils import z85

from paceline.clock import now_ns
from paceline.core import wire
from paceline.core.messages import PeerMessage
from paceline.core.wire import WireError
from paceline.limits import LISTEN_BACKLOG
from paceline.refusals import Entry, RefusalReason, refuse
from paceline.scratch import SUN_PATH_MAX
from paceline.worker.fresh_memory import fresh_memory
from paceline.worker.handshakes import EVENTS, Handshakes

Bytes = bytes | bytearray | memoryview

POLLIN: Final = int(zmq.POLLIN)
"""`zmq.POLLIN` as a plain number: comparing zmq's flag object takes a microsecond."""
PIECE_BYTES: Final = 64 * 1024
"""Upper bound on a frame that is sent, in bytes. It is what the I/O thread encrypts at a time, and
what a GO may have to wait for."""
LOCAL_PIECE_BYTES: Final = 1024 * 1024
"""The same on the bulk lane over a socket file. Each frame that is sent without a copy is followed
by a message to a thread of pyzmq: 0.4 GB cost 1.3 to 1.8 s of CPU time in frames of 64 KiB, and 0.5
to 0.9 s in these (measured)."""
SLICE_BYTES: Final = 4 * 1024 * 1024
"""Number of bytes of the bulk lane that one call of `read` takes. The rounds of this rank wait for
no more than that."""
FRAME_MORE_BYTES: Final = 1024
"""Number of bytes by which a frame that a socket accepts may be longer than a piece, since
encryption adds some."""
MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Upper bound on a message without its payload, in bytes: 100 times the log of a large job."""
PARTS_MAX: Final = 4096
"""Upper bound on the number of parts of one payload."""
UNREAD_FAST_MAX: Final = 1000
"""Number of unread messages of one peer on the fast lane; the rest waits on the peer's side."""
UNREAD_BULK_MAX: Final = 16
"""Number of unread pieces of one peer on the bulk lane; the rest waits on the peer's side."""
SENDER_BYTES: Final = 8
"""Number of random bytes that name the sender of a transfer on the bulk lane."""
KEY_BYTES: Final = SENDER_BYTES + 8
"""Length of the first frame on the bulk lane: the sender, and the number of its transfer."""
ARRIVING_MAX: Final = 8
"""Upper bound on the transfers that are put together at a time. More drop the oldest."""
DROPPED_MAX: Final = 64
"""Number of dropped transfers that are remembered. What still comes of them is no error."""
EVENTS_MAX: Final = 256
"""Number of connection events that are handled before messages are read again."""
EVENT: Final = struct.Struct("=HI")
"""Layout of a zmq event: its number and its value."""
HANDSHAKE_MS: Final = 10_000
"""Deadline of a handshake, in milliseconds. A connection that is not greeted and encrypted by then
is closed; an honest peer connects again."""

Sizes = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]],
    msgspec.Meta(min_length=1, max_length=PARTS_MAX),
]
"""Second frame of a message on the bulk lane: the length of the message and of each part of the
payload that follows, in bytes. A piece of the payload has a single frame behind its key."""


class Lanes(msgspec.Struct, frozen=True):
    """Addresses of both sockets of a rank. As JSON, since a path may contain any character."""

    fast: str
    bulk: str


Place = Callable[[PeerMessage, Sequence[Bytes], int], Bytes | None]
"""Returns the memory in which the next part of a payload is received, or None for new memory. It
gets the message, the parts before, and the number of bytes."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message of a peer with its payload."""

    message: PeerMessage
    payload: tuple[Bytes, ...]
    """Byte buffers that follow the message: the tensors of a state or of a missing part."""


class PeerSockets:
    """Both lanes of one rank.

    The communication thread uses it. The main thread makes it and reads `address`; any thread may
    call `wake`.
    """

    def __init__(
        self, *, directory: Path | None, name: str, host: str, token: str, alone: bool = False
    ) -> None:
        """Bind both lanes.

        Args:
            directory: Folder for socket files, if all ranks are on one machine. None: TCP on
                `host`, encrypted with the job's key (D13).
            name: Name of this rank's sockets.
            host: Name or address under which peers reach this rank.
            token: The job's token, from which the key is derived.
            alone: True if there are no peers, so nothing is opened outside of this process.
        """
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 65_000)
        self._key = None if alone or directory is not None else _curve_key(token)
        self._alone = alone
        self._senders = "a process of this user" if self._key is None else "a holder of the key"
        """Description of the senders for the log: zmq reports no more about a sender."""
        self._files: list[Path] = []
        self._piece_bytes: Final = (
            PIECE_BYTES,
            PIECE_BYTES if directory is None else LOCAL_PIECE_BYTES,
        )
        """Upper bound on a piece, for the fast and for the bulk lane."""
        self._fast, fast = self._bind(0, directory, f"{name}.f", host, UNREAD_FAST_MAX)
        self._bulk, bulk = self._bind(1, directory, f"{name}.b", host, UNREAD_BULK_MAX)
        self.address = msgspec.json.encode(Lanes(fast, bulk)).decode()
        self._out: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._used: set[tuple[str, int]] = set()
        """Keys of `_out` that were used in the current generation."""
        self._under_way: dict[str, zmq.MessageTracker] = {}
        """Tracker of the last state or part sent to each address; shows if it has left this
        process."""
        self._addresses: dict[MemberId, str] = {}
        self._packed: tuple[PeerMessage | None, bytes] = None, b""
        """The last message of the fast lane and its bytes, since a GO goes to many."""
        self._has_fast = self._has_bulk = False
        """True if `wait` has reported a message on the lane that was not read yet."""
        self._sender = os.urandom(SENDER_BYTES)
        self._transfers = 0
        """Number of transfers that were begun on the bulk lane."""
        self._arriving: dict[bytes, _Arriving] = {}
        """Messages of the bulk lane whose payload is being put together, by key."""
        self.place: Place = lambda *_: None
        """Called for each part of a payload before its first byte is read."""
        self._dropped: deque[bytes] = deque(maxlen=DROPPED_MAX)
        """Keys of transfers that are not put together any more."""
        self._lock = threading.Lock()
        self._closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for socket in (self._fast, self._bulk, self._event_fd):
            self._poller.register(socket, zmq.POLLIN)
        self._handshakes: dict[zmq.Socket[bytes], Handshakes] = {}
        """Handshakes of each lane, by the socket that reports its connection events."""
        if not alone:
            self._watch(self._fast, "inproc://fast-connections")
            self._watch(self._bulk, "inproc://bulk-connections")

    def _bind(
        self, lane: int, directory: Path | None, name: str, host: str, unread_max: int
    ) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(zmq.PULL)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, unread_max)
        socket.set(zmq.BACKLOG, LISTEN_BACKLOG)
        socket.set(zmq.MAXMSGSIZE, self._piece_bytes[lane] + FRAME_MORE_BYTES)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if directory is not None:
            path = directory / name
            assert len(str(path)) <= SUN_PATH_MAX, path
            socket.set(zmq.IPC_FILTER_UID, os.geteuid())  # the kernel reports the caller's user
            socket.bind(f"ipc://{path}")
            self._files.append(path)
            return socket, f"ipc://{path}"
        if self._alone:
            socket.bind(f"inproc://{name}")
            return socket, f"inproc://{name}"
        assert self._key is not None
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._key[1])
        port = socket.bind_to_random_port("tcp://*")
        return socket, f"tcp://{host}:{port}"

    def _watch(self, lane: zmq.Socket[bytes], where: str) -> None:
        events = self._context.socket(zmq.PAIR)
        events.set(zmq.LINGER, 0)
        events.set(zmq.RCVHWM, 0)  # unbounded, else zmq's I/O thread would block
        lane.monitor(where, EVENTS)
        events.connect(where)
        self._handshakes[events] = Handshakes()
        self._poller.register(events, zmq.POLLIN)

    # ---- sending --------------------------------------------------------------------------

    def know(self, member: MemberId, address: str) -> None:
        """Store the address of a peer, in place of an older one."""
        if self._addresses.get(member) != address:
            self._addresses[member] = address

    def keep_only(self, members: Sequence[MemberId]) -> None:
        """Close the connections that a new generation does not need.

        These are the connections to ranks that are no members, and those that the generation before
        did not use. Whatever still waits in them is of an older generation, which is no longer read
        (R4). Otherwise, since a rank has other peers after each change, it would end up linked to
        all ranks. A transfer of which nothing came in the generation before is dropped as well: its
        sender has ended.

        Args:
            members: The members of the generation, and the holder (R7).
        """
        self._addresses = {m: a for m, a in self._addresses.items() if m in members}
        live = set(self._addresses.values())
        for key in [k for k in self._out if k[0] not in live or k not in self._used]:
            self._give_up(key)
        self._used.clear()
        for transfer, arriving in list(self._arriving.items()):
            if not arriving.is_used:
                self._drop(transfer)
            arriving.is_used = False

    def send(self, member: MemberId, message: PeerMessage) -> None:
        """Send a message on the fast lane. Never blocks.

        What a dead peer does not read is lost with the peer.

        Args:
            member: A peer that `know` was called for.
            message: The message.
        """
        if message is not self._packed[0]:  # packed once: a GO goes to many ranks
            self._packed = message, wire.pack_peer(message)
        data = self._packed[1]
        if len(data) <= PIECE_BYTES:
            self._socket(member, 0).send(data, copy=True)
        else:
            self._socket(member, 0).send_multipart(_pieces([data], PIECE_BYTES), copy=True)

    def send_bulk(self, member: MemberId, message: PeerMessage, payload: Sequence[Bytes]) -> None:
        """Send a message with a payload on the bulk lane, in pieces. Never blocks.

        Only the newest message to each peer counts. If a slow peer has not taken all of an older
        one, the rest of that is dropped, so at most one state waits for each peer (D15).

        Args:
            member: A peer that `know` was called for.
            message: The message.
            payload: Byte buffers. Nothing is copied: they must not change until they are sent.
        """
        address = self._addresses[member]
        before = self._under_way.get(address)
        if before is not None and not before.done:
            self._give_up((address, 1))
        parts = [memoryview(part).cast("B") for part in payload]
        packed = wire.pack_peer(message)
        sizes = msgspec.msgpack.encode([len(packed), *(part.nbytes for part in parts)])
        self._transfers += 1
        key = self._sender + self._transfers.to_bytes(KEY_BYTES - SENDER_BYTES)
        socket, length = self._socket(member, 1), self._piece_bytes[1]
        frames: list[Bytes] = [key, sizes, *_pieces([packed], length)]
        tracker = socket.send_multipart(frames, copy=False, track=True)
        pieces = _pieces(parts, length)
        for at, piece in enumerate(pieces, 1):
            socket.send(key, zmq.SNDMORE, copy=True)
            tracker = socket.send(piece, copy=False, track=at == len(pieces))
        assert tracker is not None, "asked for"
        self._under_way[address] = tracker  # pieces leave in order, so the last one shows it

    def _give_up(self, key: tuple[str, int]) -> None:
        self._out.pop(key).close(linger=0)
        if key[1]:
            self._under_way.pop(key[0], None)

    def _socket(self, member: MemberId, lane: int) -> zmq.Socket[bytes]:
        address = self._addresses[member]
        key = (address, lane)
        self._used.add(key)
        if key not in self._out:
            socket = self._context.socket(zmq.PUSH)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.MAXMSGSIZE, self._piece_bytes[lane] + FRAME_MORE_BYTES)
            socket.copy_threshold = 0  # nothing is copied, so the tracker covers small pieces too
            if self._key is not None:
                public, secret = self._key
                socket.set(zmq.CURVE_SERVERKEY, public)
                socket.set(zmq.CURVE_PUBLICKEY, public)
                socket.set(zmq.CURVE_SECRETKEY, secret)
            lanes = msgspec.json.decode(address, type=Lanes)
            socket.connect(lanes.bulk if lane else lanes.fast)
            self._out[key] = socket
        return self._out[key]

    # ---- receiving ------------------------------------------------------------------------

    def wait(self, timeout_ms: int | None) -> bool:
        """Block in the kernel until a message or a `wake` arrives.

        Args:
            timeout_ms: Upper bound on the wait, in milliseconds; None for no bound.

        Returns:
            False if the time ran out.
        """
        end_ns = None if timeout_ms is None else now_ns() + timeout_ms * NS_PER_MS
        while ready := self._poller.poll(timeout_ms):
            came = [self._is_ready(source) for source, _ in ready]
            if any(came):
                return True
            if end_ns is not None:
                timeout_ms = max(0, (end_ns - now_ns()) // NS_PER_MS)
        return False

    def _is_ready(self, source: object) -> bool:
        """Note what arrived at a source; return False if it only concerns connections."""
        if source == self._event_fd:
            os.eventfd_read(self._event_fd)
        elif source is self._bulk:
            self._has_bulk = True
        elif source is self._fast:
            self._has_fast = True
        else:
            assert isinstance(source, zmq.Socket)
            self._note_connections(source)
            return False
        return True

    def read(self) -> ReceivedMessage | None:
        """Return the next message, without waiting.

        Returns:
            The message. None if there is no message, or the next one was refused or has come only
            in part (SLICE_BYTES). A flood of refused messages, or a large state, then holds up
            nothing: the caller goes back to `wait`, which returns at once if there is more.
        """
        # Ask whether a message is there first: zmq's exception for an empty lane costs more.
        lanes = (self._fast,) * self._has_fast + (self._bulk,) * self._has_bulk
        for socket in lanes:
            if not int(socket.get(zmq.EVENTS)) & POLLIN:
                continue
            try:
                return self._read_slice() if socket is self._bulk else _read_fast(socket)
            except _TooLargeError:
                self._refuse(socket, RefusalReason.TOO_LARGE)
            except WireError:
                self._refuse(socket, RefusalReason.MALFORMED)
            return None
        self._has_fast = self._has_bulk = False
        return None

    def _read_slice(self) -> ReceivedMessage | None:
        """Read from the bulk lane until a message is complete, or for SLICE_BYTES.

        It also raises what `_open` raises.

        Returns:
            The message, or None if none is complete yet.

        Raises:
            WireError: The frames are not those that were named.
        """
        taken = 0
        while taken < SLICE_BYTES and int(self._bulk.get(zmq.EVENTS)) & POLLIN:
            key = self._bulk.recv(zmq.NOBLOCK)
            frames = _rest(self._bulk)
            second = next(frames, None)
            if second is None or len(key) != KEY_BYTES:
                raise WireError("no key, or nothing behind it")
            taken += len(second)
            if self._bulk.get(zmq.RCVMORE):
                self._open(key, second, frames)
            elif key in self._arriving:
                try:
                    self._arriving[key].add(second)
                except WireError:
                    self._drop(key)
                    raise
            elif key not in self._dropped:
                raise WireError("a piece of a message that was not begun")
            arriving = self._arriving.get(key)
            if arriving is not None and arriving.is_complete:
                del self._arriving[key]
                return ReceivedMessage(arriving.message, tuple(arriving.payload))
        return None

    def _open(self, key: bytes, sizes: Bytes, frames: Iterator[Bytes]) -> None:
        """Begin to put a message together; its sender has given up those before.

        Args:
            key: Key of the transfer.
            sizes: Frame with the sizes.
            frames: Frames of the message, without its payload.

        Raises:
            WireError: The bytes are not a message, or there is no memory for its payload.
            _TooLargeError: The message is longer than MESSAGE_BYTES_MAX.
        """
        try:
            length, *parts = msgspec.msgpack.decode(sizes, type=Sizes)
        except UNDECODABLE as error:
            raise WireError(f"no sizes: {error}") from None
        if length > MESSAGE_BYTES_MAX:
            raise _TooLargeError
        message = wire.unpack_peer(_join(frames, length))
        # Two connections of a sender may be read in any order.
        own = [other for other in self._arriving if other.startswith(key[:SENDER_BYTES])]
        if key in self._dropped or any(other >= key for other in own):
            self._dropped.append(key)
            return
        arriving = _Arriving(message, parts, self.place)
        for other in own:
            self._drop(other)
        while len(self._arriving) >= ARRIVING_MAX:
            self._drop(next(iter(self._arriving)))
        self._arriving[key] = arriving

    def drop_placed(self) -> None:
        """Drop unfinished transfers that are received in memory of `place`, which changes now."""
        for key in [key for key, each in self._arriving.items() if each.is_placed]:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        del self._arriving[key]
        self._dropped.append(key)

    def _note_connections(self, events: zmq.Socket[bytes]) -> None:
        """Count the connections that zmq has refused by itself."""
        handshakes = self._handshakes[events]
        with suppress(zmq.Again):
            for _ in range(EVENTS_MAX):
                event, _ = events.recv_multipart(zmq.NOBLOCK)
                reason = handshakes.happened(*EVENT.unpack(event))
                if reason is not None:
                    refuse(Entry.PEERS, reason, "a stranger")

    def _refuse(self, socket: zmq.Socket[bytes], reason: RefusalReason) -> None:
        """Drop the rest of a message and count it as refused.

        All of its frames are here, since zmq does not show a message before it is complete.
        """
        while socket.get(zmq.RCVMORE):
            socket.recv(zmq.NOBLOCK, copy=False)
        self.refuse(reason)

    def refuse(self, reason: RefusalReason) -> None:
        """Count a message that was read and is not accepted."""
        refuse(Entry.PEERS, reason, self._senders)

    def wake(self) -> None:
        """End a `wait`. Any thread may call this, also after `close`."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event_fd, 1)

    def close(self) -> None:
        """Close both lanes and all connections, without waiting for what was not sent."""
        with self._lock:
            self._closed = True
            os.close(self._event_fd)
        for lane in () if self._alone else (self._fast, self._bulk):
            lane.monitor(None, 0)
        for socket in (*self._out.values(), self._fast, self._bulk, *self._handshakes):
            socket.close(linger=0)
        self._out.clear()
        self._context.term()
        for path in self._files:
            path.unlink(missing_ok=True)


class _TooLargeError(Exception):
    """A message is longer than any that a peer sends."""


def _pieces(parts: Sequence[Bytes], length: int) -> list[Bytes]:
    views = [memoryview(part).cast("B") for part in parts]
    return [v[at : at + length] for v in views for at in range(0, len(v), length)]


def _read_fast(socket: zmq.Socket[bytes]) -> ReceivedMessage:
    """Read a message of the fast lane.

    Returns:
        The message, without a payload.

    Raises:
        _TooLargeError: It is longer than MESSAGE_BYTES_MAX. (A `WireError` is raised if the bytes
            are not a message.)
    """
    data = socket.recv(zmq.NOBLOCK)
    if socket.get(zmq.RCVMORE):
        whole = bytearray(data)
        for piece in _rest(socket):
            if len(whole) + len(piece) > MESSAGE_BYTES_MAX:
                raise _TooLargeError
            whole += piece
        data = bytes(whole)
    return ReceivedMessage(wire.unpack_peer(data), ())


def _rest(socket: zmq.Socket[bytes]) -> Iterator[Bytes]:
    """Yield the frames behind the one that was read, which are all here.

    Yields:
        The bytes of the next frame.
    """
    while socket.get(zmq.RCVMORE):
        yield socket.recv(zmq.NOBLOCK, copy=False).buffer


def _join(frames: Iterator[Bytes], length: int) -> bytes:
    """Join frames, which have to be so many bytes together.

    Args:
        frames: The frames.
        length: Number of bytes.

    Returns:
        The bytes.

    Raises:
        WireError: The frames have another length.
    """
    whole = bytearray()
    for frame in frames:
        whole += frame
        if len(whole) > length:
            break
    if len(whole) != length:
        raise WireError("the frames of a message have another length than was named")
    return bytes(whole)


class _Arriving:
    """A message of the bulk lane whose payload is put together while it arrives.

    Each frame is freed once it is copied, so a state is in memory once. The interpreter lock is
    held for one piece at a time.
    """

    __slots__ = ("_missing", "_place", "_sizes", "is_placed", "is_used", "message", "payload")

    def __init__(self, message: PeerMessage, sizes: Sequence[int], place: Place) -> None:
        """Begin without a piece.

        Args:
            message: The message, which is complete.
            sizes: Number of bytes of each part of its payload.
            place: Returns memory for a part.
        """
        self.message, self._sizes, self._place = message, sizes, place
        self.is_placed = False
        """True if `place` has given memory for a part."""
        self.payload: list[Bytes] = []
        """Parts of the payload; the last one may lack bytes."""
        self._missing = 0
        """Number of bytes that the last part lacks."""
        self.is_used = True
        """True if something came of it in the present generation."""
        self._begin_part()

    @property
    def is_complete(self) -> bool:
        """Return True if all of the payload has arrived."""
        return not self._missing and len(self.payload) == len(self._sizes)

    def add(self, piece: Bytes) -> None:
        """Copy the next piece to where it belongs.

        Args:
            piece: Bytes of one part of the payload.

        Raises:
            WireError: It is empty or longer than what the part lacks, or there is no memory for the
                next part.
        """
        if not 0 < len(piece) <= self._missing:
            raise WireError("a piece has another length than was named")
        part = self.payload[-1]
        at = len(part) - self._missing
        memoryview(part)[at : at + len(piece)] = piece
        self._missing -= len(piece)
        self.is_used = True
        self._begin_part()

    def _begin_part(self) -> None:
        """Get memory for the next part that is not empty, if the present one is complete.

        Raises:
            WireError: There is no memory for it.
        """
        while not self._missing and len(self.payload) < len(self._sizes):
            size = self._sizes[len(self.payload)]
            placed = self._place(self.message, self.payload, size) if size else None
            self._missing = size
            if placed is not None:
                self.is_placed = True
                self.payload.append(placed)
                continue
            if size <= PIECE_BYTES:
                self.payload.append(bytearray(size))
                continue
            try:
                self.payload.append(memoryview(fresh_memory(size)))
            except OSError as error:
                raise WireError(f"no room for {size} bytes: {error}") from None


def _curve_key(token: str) -> tuple[bytes, bytes]:
    """Derive the job's CURVE key from its token.

    Only holders of the token know the public half, so every peer that can connect belongs to the
    job.

    Returns:
        The public and the secret key, encoded as Z85.
    """
    secret = hashlib.blake2b(token.encode(), digest_size=32, person=b"paceline-trigger").digest()
    encoded = z85.encode(secret)
    return zmq.curve_public(encoded), encoded
