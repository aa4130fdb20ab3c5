"""The agent's end of the pipes to shims and ranks: a socket of this user alone.

The socket lies in the abstract namespace: no file is left over however the agent dies, and no path
can be too long. Each connection introduces itself with the key of a launch; whose it is, the kernel
says (SO_PEERCRED). Messages are small JSON objects, one per packet; what is none, or none of these,
is refused and counted, and the pipe goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from paceline_api.decoding import UNDECODABLE

from paceline.core.messages import ScriptError
from paceline.core.protocol.ids import GenerationId
from paceline.limits import LISTEN_BACKLOG
from paceline.peer_credentials import credentials_of
from paceline.refusals import Entry, Reason, refuse

MESSAGE_BYTES_MAX: Final = 32 * 1024


class Message(msgspec.Struct, frozen=True):
    """A message of a shim or its rank. The last one about how a rank ends counts."""

    kind: str
    key: str = ""
    """Of the launch, in the introduction of a shim."""
    message: str = ""
    """For the user."""
    released: tuple[GenerationId, int] | None = None
    """With which record and version the rank was released (R17)."""
    error: ScriptError | None = None


_decode = msgspec.json.Decoder(Message).decode


class RankPipe:
    """One connection. `on_message` gets None at its end, once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_message: Callable[[RankPipe, Message | None], None],
    ) -> None:
        self._loop, self._socket = loop, sock
        self.on_message = on_message
        self.open = True
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._read)

    @property
    def peer_pid(self) -> int:
        return credentials_of(self._socket).pid

    def send(self, message: dict[str, str], fds: Sequence[int] = ()) -> bool:
        """False if the peer is gone, or stopped for so long that its buffer is full."""
        data = json.dumps(message).encode()
        try:
            if fds:
                socket.send_fds(self._socket, [data], fds)
            else:
                self._socket.send(data)
        except OSError:
            return False
        return True

    def drain(self) -> None:
        """Handle what has arrived by now."""
        while self.open and self._read():
            pass

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> bool:
        message: Message | None = None
        try:
            data = self._socket.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            try:
                message = _decode(data)
            except UNDECODABLE:
                refuse(Entry.RANK_PIPE, Reason.MALFORMED, f"process {self.peer_pid}")
                return True
        else:
            self.close()
        self.on_message(self, message)
        return True


class RankPipeListener:
    """Where shims call. `on_message` is that of each new pipe, until somebody changes it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[RankPipe, Message | None], None],
    ) -> None:
        self._loop, self._on_message = loop, on_message
        self.name = f"paceline-agent-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(LISTEN_BACKLOG)
        loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = self._socket.accept()
            caller = credentials_of(sock)
            if caller.uid != os.getuid():
                refuse(Entry.RANK_PIPE, Reason.OTHER_USER, str(caller))
                sock.close()
                return
            RankPipe(self._loop, sock, self._on_message)
