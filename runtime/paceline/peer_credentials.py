"""Identity of the process at the other end of a Unix socket, as the kernel reports it."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

_UCRED: Final = struct.Struct("3i")


class Credentials(NamedTuple):
    """The process that has connected, as it was at the time of its connect."""

    pid: int
    uid: int
    """Effective user id."""

    def __str__(self) -> str:
        return f"user {self.uid}, process {self.pid}"


def credentials_of(sock: socket.socket) -> Credentials:
    """Return the credentials of the other end (SO_PEERCRED). May raise OSError."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return Credentials(pid, uid)
