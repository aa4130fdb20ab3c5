"""The rank's end of the pipe to its agent.

The pipe is the socket that the shim left open as PACELINE_AGENT_FD. The rank reports how it is
going to end, and the agent asks it to drain. If the pipe closes, the agent is dead. This rank's
death would no longer be reported then, so the rank must end at once, by `os._exit` (D6).
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
from paceline_api.ids import GenerationId

from paceline.core.messages import ScriptError

MESSAGE_BYTES_MAX: Final = 32 * 1024
MESSAGE_CHARS_MAX: Final = 4_000
"""Upper bound on the length of a user-visible text, in characters; the full text is in the log."""
SEND_S: Final = 5
"""Timeout of a send, in seconds: a frozen agent must not hold up its rank."""


class AgentOrder(msgspec.Struct, frozen=True):
    """An order of the agent: `kind` is `drain` (R16) or `shutdown` (the job is over, leave)."""

    kind: str
    why: str = ""


class AgentPipe:
    """The rank's side of the socket to its agent.

    Takes over the descriptor. Any thread may call `tell`; only one thread may call `read`.
    """

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
        """Report that this rank is present, or how it will end. Any thread may call this.

        If the rank reports an end several times, the agent takes the last report. A send that does
        not succeed within SEND_S counts as failed.

        Args:
            kind: `present`, `finished` (the job was released), `dismissed` or `failed`.
            message: The reason, for people; cut to MESSAGE_CHARS_MAX characters.
            released: The record and the version with which the job was released (R17).
            error: The exception that ended the script.

        Returns:
            True if the report was sent; False if the agent is gone or does not read.
        """
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
        """Block until the agent sends an order.

        Messages that cannot be decoded are skipped.

        Returns:
            The order, or None if the agent is dead; then this rank must end too.
        """
        while True:
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except OSError:
                return None
            if not data:
                return None
            with suppress(*UNDECODABLE):  # an agent sends only orders
                return msgspec.json.decode(data, type=AgentOrder)

    def close(self) -> None:
        """Close the socket; this also wakes a blocked `read`, which then returns None."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the agent has closed it already
            pass
        self._socket.close()
