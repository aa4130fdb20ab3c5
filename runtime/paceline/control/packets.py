"""Messages of any size over a socket pair that preserves packet boundaries (SOCK_SEQPACKET).

It connects an agent and its rank, and the ranks of a group. The kernel takes a packet as a whole or
not at all, and none that is larger than its buffer. A message of more than PACKET_BYTES is written
to anonymous memory (memfd), and the packet passes the file descriptor.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Final

from paceline.limits import MIB

PACKET_BYTES: Final = 32 * 1024
"""Largest message that is sent as a packet of its own, in bytes."""
MEMORY_BYTES_MAX: Final = 4 * MIB
"""Largest message that is accepted in memory, in bytes. A coordinator and an agent have the same
limit. Such memory costs its sender nothing, so the receiver checks its size first."""
_IN_MEMORY: Final = b"@"
"""Content of a packet that passes memory. No message begins like that: they are objects in JSON or
msgpack."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new line. Neither ever blocks."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def send(line: socket.socket, data: bytes) -> None:
    """Send one message.

    If the buffer is full now, a line that blocks waits, and any other raises BlockingIOError. The
    call raises another OSError if the other end is closed.

    Args:
        line: One end of a line.
        data: The message. It is copied; the caller may reuse it.
    """
    if len(data) <= PACKET_BYTES:
        line.send(data, socket.MSG_NOSIGNAL)
        return
    with open(os.memfd_create("paceline-message"), "w+b", buffering=0) as memory:  # noqa: PTH123
        memory.write(data)
        socket.send_fds(line, [_IN_MEMORY], [memory.fileno()], socket.MSG_NOSIGNAL)


def receive(line: socket.socket, bytes_max: int = MEMORY_BYTES_MAX) -> bytes | None:
    """Return the next message, or None at the end of the line.

    If a packet passes a descriptor that is not memory with a message, the packet itself is
    returned, which does not decode as a message. If no message has come yet, a line that blocks
    waits, and any other raises BlockingIOError.

    Args:
        line: One end of a line.
        bytes_max: Largest message that is accepted, in bytes.

    Returns:
        The message; None if the other end is closed.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(line, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not descriptors:
        return data or None
    try:
        return _read(descriptors[0], bytes_max)
    except OSError:  # no memory with a message: the packet is returned, which does not decode
        return data
    finally:
        os.close(descriptors[0])


def _read(descriptor: int, bytes_max: int) -> bytes:
    """Return the message in memory that was handed over.

    Args:
        descriptor: A file descriptor from the other end.
        bytes_max: Largest message that is accepted, in bytes.

    Returns:
        The message.

    Raises:
        OSError: It is not memory with a message. A pipe or a device, for example, may never end.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= bytes_max:
        raise OSError(errno.EINVAL, "no message in memory")
    return os.pread(descriptor, status.st_size, 0)  # the file offset is where the writer left it
