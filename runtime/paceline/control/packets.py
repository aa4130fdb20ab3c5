"""Messages of any size over a socket that keeps packets apart, between an agent and its rank.

The kernel takes a packet as a whole or not at all, and none that is larger than its buffer. What is
larger than PACKET_BYTES lies in memory without a name, and the packet hands that over.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from typing import Final

log = logging.getLogger("paceline.control")

PACKET_BYTES: Final = 32 * 1024
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""A COMMIT to 10,000 ranks has 3 MiB. Memory without a name costs its sender nothing, so the
receiver looks at its size before reading it."""
_IN_MEMORY: Final = b"@"
"""No message begins like that: they are JSON objects."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends, which never block."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def send(line: socket.socket, data: bytes) -> None:
    """Raises BlockingIOError if there is no room now, another OSError if nobody is there."""
    if len(data) <= PACKET_BYTES:
        line.send(data, socket.MSG_NOSIGNAL)
        return
    with open(os.memfd_create("paceline-message"), "w+b", buffering=0) as memory:  # noqa: PTH123
        memory.write(data)
        socket.send_fds(line, [_IN_MEMORY], [memory.fileno()], socket.MSG_NOSIGNAL)


def receive(line: socket.socket) -> bytes | None:
    """The next message, None at the end. Raises BlockingIOError if there is none now.

    Whoever hands over something else than memory, or too much of it, has ended the conversation.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(line, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not descriptors:
        return data or None
    with open(descriptors[0], "rb") as memory:  # noqa: PTH123
        handed = os.fstat(memory.fileno())
        if not stat.S_ISREG(handed.st_mode) or handed.st_size > MESSAGE_BYTES_MAX:
            log.warning("a message of %d bytes was not taken; the line is closed", handed.st_size)
            return None
        memory.seek(0)  # where it is was left by the writer
        return memory.read(MESSAGE_BYTES_MAX) or None
