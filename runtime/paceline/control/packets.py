"""Messages of any size over a socket that keeps packets apart, between an agent and its rank.

The kernel takes a packet as a whole or not at all, and none that is larger than its buffer. What is
larger than PACKET_BYTES lies in memory without a name, and the packet hands that over.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Final

from paceline.limits import MIB

PACKET_BYTES: Final = 32 * 1024
MEMORY_BYTES_MAX: Final = 4 * MIB
"""Of a message that is handed over, as much as a coordinator and an agent take of each other.
Memory without a name costs its sender nothing, so the receiver looks at its size first."""
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
    """The next message, None at the end; of a descriptor that is no such memory the packet itself,
    which is no message. Raises BlockingIOError if there is none now."""
    try:
        data, descriptors, _, _ = socket.recv_fds(line, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not descriptors:
        return data or None
    try:
        return _read(descriptors[0])
    except OSError:  # as far as it can be read at all
        return data
    finally:
        os.close(descriptors[0])


def _read(descriptor: int) -> bytes:
    """Raises OSError for what is no memory with a message: a pipe or a device may never end."""
    told = os.fstat(descriptor)
    if not stat.S_ISREG(told.st_mode) or not 0 < told.st_size <= MEMORY_BYTES_MAX:
        raise OSError(errno.EINVAL, "no message in memory")
    return os.pread(descriptor, told.st_size, 0)  # where it is was left by the writer
