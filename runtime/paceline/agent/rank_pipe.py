"""The agent's end of the pipes to shims and ranks, over a socket for this user only.

The socket lies in the abstract namespace: no file is left however the agent dies, and no path can
be too long. Each connection introduces itself with the key of a launch, and the kernel provides its
pid (SO_PEERCRED). Messages are small JSON objects, one per packet. Any other packet is refused
and counted, and the pipe stays open.
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
from paceline_api.ids import GenerationId

from paceline.core.messages import ScriptError
from paceline.limits import LISTEN_BACKLOG
from paceline.peer_credentials import credentials_of
from paceline.refusals import Entry, RefusalReason, refuse

MESSAGE_BYTES_MAX: Final = 32 * 1024


class PipeMessage(msgspec.Struct, frozen=True):
    """A message of a shim or its rank. Of several about how a rank ends, the last one counts."""

    kind: str
    key: str = ""
    """Key of the launch, when a shim introduces itself."""
    message: str = ""
    """Text for the user."""
    released: tuple[GenerationId, int] | None = None
    """Record and version with which the rank was released (R17)."""
    error: ScriptError | None = None


_decode = msgspec.json.Decoder(PipeMessage).decode


class RankPipe:
    """One connection. `on_message` is called with None at its end, once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_message: Callable[[RankPipe, PipeMessage | None], None],
    ) -> None:
        self._loop, self._socket = loop, sock
        self.on_message = on_message
        self.open = True
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._read)

    @property
    def peer_pid(self) -> int:
        """Pid of the process that connected, as the kernel reports it."""
        return credentials_of(self._socket).pid

    def send(self, message: dict[str, str], fds: Sequence[int] = ()) -> bool:
        """Send a message without blocking.

        Args:
            message: A flat JSON object.
            fds: Descriptors to pass along. The caller still owns them.

        Returns:
            False if the peer is gone, or its buffer is full because it does not read.
        """
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
        """Handle every message that has arrived by now."""
        while self.open and self._read():
            pass

    def close(self) -> None:
        """Close the connection, without a call of `on_message`."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> bool:
        message: PipeMessage | None = None
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
                refuse(Entry.RANK_PIPE, RefusalReason.MALFORMED, f"process {self.peer_pid}")
                return True
        else:
            self.close()
        self.on_message(self, message)
        return True


class RankPipeListener:
    """The socket that shims connect to. `on_message` is given to each new pipe."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[RankPipe, PipeMessage | None], None],
    ) -> None:
        self._loop, self._on_message = loop, on_message
        self.name = f"paceline-agent-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(LISTEN_BACKLOG)
        loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening. Open pipes stay open."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = self._socket.accept()
            caller = credentials_of(sock)
            if caller.uid != os.getuid():
                refuse(Entry.RANK_PIPE, RefusalReason.OTHER_USER, str(caller))
                sock.close()
                return
            RankPipe(self._loop, sock, self._on_message)
