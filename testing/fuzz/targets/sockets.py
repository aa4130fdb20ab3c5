"""Input that other processes send over sockets and pipes of a machine or a network."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import zmq
from paceline.agent.process import RankProcess
from paceline.agent.rank_pipe import RankPipe
from paceline.control import packets
from paceline.core import messages, wire
from paceline.local import control
from paceline.transport import rendezvous
from paceline.transport.base import Abort, Group, Peer, TransportError
from paceline.transport.rendezvous import Deadline, PeerClosedError, PeerConnection
from paceline.transport.shm.rendezvous import LocalRendezvous, machine_place
from paceline.worker.agent_pipe import AgentPipe
from paceline.worker.peer_sockets import KEY_BYTES, Lanes, PeerSockets
from paceline_api.ids import MemberId
from paceline_api.settings import ResolvedJob

from testing.fuzz.samples import json_samples, msgpack_samples
from testing.fuzz.target import Form, Reader, Target

PACKET_BYTES_MAX: Final = 32 * 1024
_MEMORY: Final = b"@"
_LAST: Final = "this is the last one"
_LAST_ORDER: Final = msgspec.json.encode({"kind": "shutdown", "why": _LAST})
_HEADER: Final = struct.Struct("!I")
SEALED: Final = b"="
"""Prefix of input that is sent as a peer with the token would send it. Other input is sent as it
is."""
SECRET: Final = rendezvous.secret_of("token")


def _pair(stack: ExitStack, kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    for end in (ours, theirs):
        end.setblocking(False)
        stack.enter_context(end)
    return ours, theirs


# ---- an agent and its rank -----------------------------------------------------------------------


def _packets(stack: ExitStack, _folder: Path) -> Reader:
    """Return a reader for a packet, or for shared memory of a size that the sender chooses."""
    ours, theirs = _pair(stack, socket.SOCK_SEQPACKET)

    def reader(data: bytes) -> object:
        if not data.startswith(_MEMORY):
            theirs.send(data or b"\0")
            return packets.receive(ours)
        (size,) = _HEADER.unpack(data[1:5].ljust(4, b"\0"))
        memory = os.memfd_create("fuzz")
        try:
            os.ftruncate(memory, size)
            os.write(memory, data[5:])
            socket.send_fds(theirs, [data[:1]], [memory])
        finally:
            os.close(memory)
        return packets.receive(ours)

    return reader


def _agent_pipe(stack: ExitStack, _folder: Path) -> Reader:
    """Return a reader for what an agent receives from its rank, down to each field's meaning."""
    ours, theirs = _pair(stack, socket.SOCK_SEQPACKET)
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    nothing = cast("Any", None)
    process = RankProcess(
        MemberId(0, 0, 1),
        loop=loop,
        reaper=nothing,
        output=nothing,
        lines=None,
        record_fd=-1,
        post=lambda _process, _event: None,
    )
    pipe = RankPipe(loop, ours, process._from_rank)
    stack.callback(pipe.close)

    def reader(data: bytes) -> object:
        theirs.send(data or b"\0")
        pipe.drain()
        return None

    return reader


def _rank_pipe(_stack: ExitStack, _folder: Path) -> Reader:
    """Return a reader for what a rank receives from its agent, up to a valid order."""

    def reader(data: bytes) -> object:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipe = AgentPipe(ours.detach())
        with theirs, closing(pipe):
            theirs.send(data or b"\0")
            theirs.send(_LAST_ORDER)
            while (order := pipe.read()) is not None and order.why != _LAST:
                pass
            assert order is not None, "the pipe has ended"
            return order

    return reader


# ---- two ranks -----------------------------------------------------------------------------------


class _Offer(msgspec.Struct):
    port: str


class _Caller:
    """The calling end of a connection. It has the job's token, so it can sign what it sends."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._key = b""
        self._count = 0

    def answer(self, greeting: bytes) -> bytes:
        """Derive the session key from the greeting; return the nonce for the listener."""
        nonce = bytes(rendezvous.NONCE_BYTES)
        self._key = rendezvous._session_key(SECRET, greeting[len(rendezvous.GREETING) :], nonce)
        return nonce

    def sealed(self, body: bytes) -> bytes:
        """Return a signed frame, so that the body reaches the parser."""
        counted = rendezvous._COUNTED.pack(rendezvous._CALLER, self._count)
        self._count += 1
        mac = hmac.digest(self._key, counted + body, "sha256")
        return rendezvous._HEADER.pack(len(body), mac) + body


def _peer_connection(stack: ExitStack, _folder: Path) -> Reader:
    """Return a reader for a message of an authenticated peer, or for any other bytes."""

    def reader(data: bytes) -> object:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            connection, caller = PeerConnection(ours, "a peer"), _Caller(theirs)
            nonce = caller.answer(rendezvous.GREETING + connection._nonce)
            connection._key = rendezvous._session_key(SECRET, connection._nonce, nonce)
            data = data[:PACKET_BYTES_MAX]
            signed = data.startswith(SEALED)
            theirs.send(caller.sealed(data[len(SEALED) :]) if signed else data or b"\0")
            return connection.poll(_Offer)

    return reader


def _rendezvous(stack: ExitStack, _folder: Path) -> Reader:
    """Return a reader for a caller where ranks of one machine meet, with or without the token."""
    meeting = LocalRendezvous(machine_place())
    stack.callback(meeting.close)
    name = meeting.address.rpartition("/")[2]
    peers = (Peer("0.0#1", meeting.address), Peer("1.0#1", ""))
    number = (1 << 20) + 1
    group = Group(key="1.1@a", number=number, peers=peers, rank=0, secret=SECRET)
    abort = Abort()

    def offered() -> _Offer:
        offer, connection = meeting.answer(group, 1, _Offer, Deadline(abort, 0.0))
        connection.close()
        return offer

    def reader(data: bytes) -> object:
        data = data[:PACKET_BYTES_MAX]
        with socket.socket(socket.AF_UNIX) as line:
            line.setblocking(False)
            line.connect(f"\0{name}")
            with suppress(TransportError):
                offered()  # the first attempt accepts and greets the caller
            if data.startswith(SEALED):
                caller = _Caller(line)
                nonce = caller.answer(line.recv(len(rendezvous.GREETING) + rendezvous.NONCE_BYTES))
                data = nonce + caller.sealed(data[len(SEALED) :])
            line.send(data or b"\0")
            line.shutdown(socket.SHUT_WR)
            return offered()

    return reader


def _peer_sockets(stack: ExitStack, folder: Path) -> Reader:
    """Return a reader for frames at a rank's sockets from another process of the same user."""
    sockets = PeerSockets(directory=folder, name="r", host="", token="t")
    stack.callback(sockets.close)
    lanes = msgspec.json.decode(sockets.address, type=Lanes)
    context = zmq.Context()
    stack.callback(context.term)
    senders = []
    for lane in (lanes.fast, lanes.bulk):
        sender = context.socket(zmq.PUSH)
        sender.set(zmq.LINGER, 0)
        sender.connect(lane)
        stack.callback(sender.close)
        senders.append(sender)

    def reader(data: bytes) -> object:
        lane, frames = data[:1] == b"\1", data[1:].split(_NEXT_FRAME)
        senders[lane].send_multipart(frames)
        sockets.wait(1000)
        return sockets.read()

    return reader


_HELLO: Final = rendezvous.Hello(
    generation="1.1@a",
    number=(1 << 20) + 1,
    sender="1.0#1",
    to="0.0#1",
    offer=msgspec.Raw(msgspec.msgpack.encode(_Offer("x"))),
)
_NEXT_FRAME: Final = b"|next|"
_ASK: Final = msgpack_samples(messages.AskState, bytes((wire.WIRE_VERSION,)))[0]

# ---- two terminals -------------------------------------------------------------------------------


class _Runner:
    """A runner that obeys each request and has a new view for each question."""

    def __init__(self) -> None:
        self.revision = 0

    def view(self) -> control.View:
        """Return a view with a new revision."""
        self.revision += 1
        return control.View("digits", "/runs/digits-1", None, 2, 1.0, None, self.revision)

    def printed_bytes(self) -> int:
        """Return a constant length of the output."""
        return 1

    def scale(self, replicas: int) -> int:
        """Accept any number of replicas."""
        return replicas

    def suspend(self, suspend: bool) -> None:
        """Accept the request."""

    def remove(self) -> None:
        """Accept the request."""


class _NoWait(control.Pulse):
    async def until(self, holds: Callable[[], bool], timeout_s: float) -> None:  # noqa: ARG002
        """Check the condition once instead of waiting for it."""
        holds()


def _control(stack: ExitStack, folder: Path) -> Reader:
    """Return a reader for requests on the socket of a job's runner."""
    job = msgspec.json.decode(json_samples(ResolvedJob)[0], type=ResolvedJob)
    asked = control.Control(job, folder, _Runner(), sockets=folder, warn=lambda _: None)
    asked.pulse = _NoWait()
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)

    def reader(data: bytes) -> object:
        return loop.run_until_complete(asked._answer(data))

    return reader


TARGETS: Final = (
    Target(
        name="packets",
        start=_packets,
        errors=(OSError,),
        seeds=(b'{"type":"beat"}', _MEMORY + _HEADER.pack(100) + b"{}"),
        words=(_MEMORY, _MEMORY + b"\xff\xff\xff\xff", _MEMORY + b"\x7f\0\0\0"),
        bytes_max=PACKET_BYTES_MAX,
    ),
    Target(
        name="agent-pipe",
        start=_agent_pipe,
        errors=(),
        seeds=(
            b'{"kind":"present","message":""}',
            b'{"kind":"finished","message":"","released":[[1,"a",1],7],"error":null}',
            b'{"kind":"failed","error":{"type":"ValueError","message":"m","file":"a.py","line":3}}',
        ),
        form=Form.JSON,
        bytes_max=PACKET_BYTES_MAX,
    ),
    Target(
        name="rank-pipe",
        start=_rank_pipe,
        errors=(),
        seeds=(b'{"kind":"drain","why":"fewer replicas"}', b'{"kind":"shutdown","why":""}'),
        form=Form.JSON,
        bytes_max=PACKET_BYTES_MAX,
    ),
    Target(
        name="peer-connection",
        start=_peer_connection,
        errors=(PeerClosedError,),
        seeds=(SEALED + msgspec.msgpack.encode(_Offer("x")),),
        form=Form.MSGPACK,
        prefix=SEALED,
        words=(b"\xff\xff\xff\xff", b"\0\x10\0\1", SEALED + b"\x91" * 20_000, SEALED),
        bytes_max=PACKET_BYTES_MAX,
    ),
    Target(
        name="rendezvous",
        start=_rendezvous,
        errors=(TransportError,),
        seeds=(SEALED + msgspec.msgpack.encode(_HELLO),),
        form=Form.MSGPACK,
        prefix=SEALED,
        words=(bytes(32) + b"\xff\xff\xff\xff", SEALED + b"\x91" * 4000, SEALED, bytes(4096)),
        bytes_max=PACKET_BYTES_MAX,
    ),
    Target(
        name="peer-sockets",
        start=_peer_sockets,
        errors=(),
        seeds=(
            b"\0" + _ASK,
            b"\1" + _NEXT_FRAME.join([b"k" * KEY_BYTES, msgspec.msgpack.encode([len(_ASK)]), _ASK]),
        ),
        words=(_NEXT_FRAME, _NEXT_FRAME * 2, b"\xcf" + b"\xff" * 8, b"\x92\xce\x7f\xff\xff\xff"),
        bytes_max=PACKET_BYTES_MAX,
    ),
    Target(
        name="runner-control",
        start=_control,
        errors=(),
        seeds=json_samples(control.Request),
        form=Form.JSON,
    ),
)
