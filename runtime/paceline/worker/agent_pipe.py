"""The rank's end of its pipe to the agent.

The pipe is the socket that the shim left open as PACELINE_AGENT_FD. The rank says how it is going
to end, the agent asks it to drain, and the end of the pipe means that the agent is dead: nobody
would report this rank's death any more, so it must end at once, by `os._exit` (D6).
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from typing import Final

import msgspec
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import printable_lines

from paceline.core.messages import ScriptError
from paceline.core.protocol.ids import GenerationId

MESSAGE_BYTES_MAX: Final = 32 * 1024
MESSAGE_CHARS_MAX: Final = 4_000
"""Of a user-visible text; the rest is in the log."""
SEND_S: Final = 5
"""A frozen agent must not hold up its rank."""


class AgentOrder(msgspec.Struct, frozen=True):
    """What the agent wants: `kind` is `drain` (R16) or `shutdown` (the job is over, leave)."""

    kind: str
    why: str = ""


class AgentPipe:
    """Takes over the descriptor. `tell` may be called from any thread, `read` from one."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # not for the script's own subprocesses
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        limit = struct.pack("@ll", SEND_S, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._lock = threading.Lock()

    def tell(
        self,
        kind: str,
        message: str = "",
        *,
        released: tuple[GenerationId, int] | None = None,
        error: ScriptError | None = None,
    ) -> bool:
        """Say that this rank is `present`, and later how it will end: `finished` (released, with
        which record and version: R17), `dismissed`, or `failed` with the reason and the exception.
        The last word counts. False if the agent is gone or does not listen."""
        text = msgspec.json.encode(
            {
                "kind": kind,
                "message": printable_lines(message)[:MESSAGE_CHARS_MAX],
                "released": released,
                "error": error.printable() if error is not None else None,
            }
        )
        with self._lock:
            try:
                self._socket.send(text, socket.MSG_NOSIGNAL)
            except OSError:
                return False
        return True

    def read(self) -> AgentOrder | None:
        """Block until the agent wants something; None = it is dead, and so must be the rank."""
        while True:
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except OSError:
                return None
            if not data:
                return None
            with suppress(*UNDECODABLE):  # an agent says nothing else
                return msgspec.json.decode(data, type=AgentOrder)

    def close(self) -> None:
        """Wakes a blocked `read`, which then returns None."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the agent was first
            pass
        self._socket.close()
