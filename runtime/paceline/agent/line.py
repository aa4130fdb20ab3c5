"""The agent's end of its lines to shims and ranks: a socket in a folder of this user alone.

Each connection introduces itself with the key of a launch; who it is, the kernel says
(SO_PEERCRED). Messages are small JSON objects, one per packet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

log = logging.getLogger("paceline.agent")

MESSAGE_BYTES_MAX: Final = 32 * 1024
BACKLOG: Final = 128

Message = dict[str, Any]


class Line:
    """One connection. `on_message` gets None at its end, once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_message: Callable[[Line, Message | None], None],
    ) -> None:
        self._loop, self._socket = loop, sock
        self.on_message = on_message
        self.open = True
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._read)

    @property
    def peer_pid(self) -> int:
        size = struct.calcsize("3i")
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, _, _ = struct.unpack("3i", credentials)
        return int(pid)

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
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
                message = dict(json.loads(data))
            except ValueError:
                log.warning("a rank process sent something that is no message: %r", data[:80])
                return True
        else:
            self.close()
        self.on_message(self, message)
        return True


class Listener:
    """Where shims call. `on_message` is that of each new line, until somebody changes it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Line, Message | None], None],
    ) -> None:
        self._loop, self._on_message = loop, on_message
        # Short, since a socket's path holds at most 107 bytes; the run folder may be longer.
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=_short_folder()))
        self.path = str(self._folder / "agent")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        self._socket.listen(BACKLOG)
        loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = self._socket.accept()
            Line(self._loop, sock, self._on_message)


def _short_folder() -> str | None:
    """TMPDIR if the path fits, else a shorter place that can be written to."""
    fits = len(os.fsencode(tempfile.gettempdir())) <= 80
    return None if fits else "/tmp"
