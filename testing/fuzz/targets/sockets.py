"""What other processes send over sockets and pipes of a machine or a network."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from paceline.agent.process import RankProcess
from paceline.agent.rank_pipe import RankPipe
from paceline.control import packets
from paceline.core.protocol.ids import MemberId
from paceline.local import control
from paceline.transport.base import Abort, Group, Peer, TransportError
from paceline.transport.rendezvous import Deadline, PeerClosedError, PeerConnection
from paceline.transport.shm.rendezvous import LocalRendezvous, machine_place
from paceline.worker.agent_pipe import AgentPipe
from paceline_api.settings import ResolvedJob

from testing.fuzz.samples import json_samples
from testing.fuzz.target import Form, Reader, Target

PACKET_BYTES_MAX: Final = 32 * 1024
_MEMORY: Final = b"@"
_HEADER: Final = struct.Struct("!I")


def _pair(stack: ExitStack, kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    for end in (ours, theirs):
        end.setblocking(False)
        stack.enter_context(end)
    return ours, theirs


# ---- an agent and its rank -----------------------------------------------------------------------


def _packets(stack: ExitStack, _folder: Path) -> Reader:
    """A packet, or memory of a size that its sender chooses, which costs that one nothing."""
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
    """What an agent reads of its rank, down to the meaning of each field."""
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


def _rank_pipe(stack: ExitStack, _folder: Path) -> Reader:
    """What a rank reads of its agent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stack.enter_context(theirs)
    pipe = AgentPipe(ours.detach())
    stack.callback(pipe.close)

    def reader(data: bytes) -> object:
        theirs.send(data or b"\0")
        return pipe.read()

    return reader


# ---- two ranks -----------------------------------------------------------------------------------


def _frame(body: bytes) -> bytes:
    return _HEADER.pack(len(body)) + body


def _peer_connection(stack: ExitStack, _folder: Path) -> Reader:
    """Frames of a peer, until there is no more."""

    def reader(data: bytes) -> object:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            connection = PeerConnection(ours)
            found = []
            theirs.send(data[:PACKET_BYTES_MAX] or b"\0")
            while (message := connection.poll()) is not None:
                found.append(message)
            return found

    return reader


def _rendezvous(stack: ExitStack, _folder: Path) -> Reader:
    """A caller that nobody knows, at the socket where ranks of one machine meet."""
    meeting = LocalRendezvous(machine_place())
    stack.callback(meeting.close)
    name = meeting.address.rpartition("/")[2]
    peers = (Peer("0.0#1", meeting.address), Peer("1.0#1", ""))
    group = Group(key="1.1@a", number=(1 << 20) + 1, peers=peers, rank=0)
    abort = Abort()

    def reader(data: bytes) -> object:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            caller.connect(f"\0{name}")
            caller.send(data[:PACKET_BYTES_MAX] or b"\0")
            caller.shutdown(socket.SHUT_WR)
            hello, connection = meeting.answer(group, 1, Deadline(abort, 0.0))
            connection.close()
            return hello

    return reader


_HELLO: Final = {"key": "1.1@a", "number": (1 << 20) + 1, "from": "1.0#1"}

# ---- two terminals -------------------------------------------------------------------------------


class _Runner:
    """A runner that does what it is asked, with news for each question."""

    def __init__(self) -> None:
        self.revision = 0

    def view(self) -> control.View:
        self.revision += 1
        return control.View("digits", "/runs/digits-1", None, 2, 1.0, None, self.revision)

    def printed_bytes(self) -> int:
        return 1

    def scale(self, replicas: int) -> int:
        return replicas

    def suspend(self, suspend: bool) -> None: ...

    def remove(self) -> None: ...


class _NoWait(control.Pulse):
    async def until(self, holds: Callable[[], bool], timeout_s: float) -> None:  # noqa: ARG002
        holds()


def _control(stack: ExitStack, folder: Path) -> Reader:
    """What the runner of a job is asked on its socket."""
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
        seeds=(_frame(b'{"port":"x"}') + _frame(b'{"ready":true}'),),
        words=(
            *(_frame(b"[" * 20_000), _frame(b"5"), _frame(b'{"a":' * 4_000), _frame(b"")),
            *(b"\0\x10\0\1", b"\xff\xff\xff\xff", _frame(b"9" * 5000), _frame(b'{"a":NaN}')),
        ),
        bytes_max=PACKET_BYTES_MAX,
    ),
    Target(
        name="rendezvous",
        start=_rendezvous,
        errors=(TransportError,),
        seeds=(_frame(json.dumps(_HELLO).encode()),),
        words=(
            *(_frame(b"[" * 20_000), _frame(b"5"), _frame(b'{"a":' * 4_000), _frame(b"")),
            *(b"\xff\xff\xff\xff", _frame(json.dumps({**_HELLO, "number": [1]}).encode())),
            _frame(json.dumps({**_HELLO, "key": {}, "number": True}).encode()),
            _frame(json.dumps({**_HELLO, "key": "2.2@b"}).encode()),
        ),
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
