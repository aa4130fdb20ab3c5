"""Packets between an agent and its rank whose file descriptor holds no message."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from paceline.control import packets
from paceline.core.wire import WireError, said_by_rank
from paceline.limits import MIB, own_bytes


def sparse(nbytes: int) -> int:
    memory = os.memfd_create("test")
    os.ftruncate(memory, nbytes)
    return memory


def read_end_of_a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def write_only() -> int:
    memory = sparse(100)
    again = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY)
    os.close(memory)
    return again


NO_MEMORY: dict[str, Callable[[], int]] = {
    "a device that never ends": lambda: os.open("/dev/zero", os.O_RDONLY),
    "a pipe": read_end_of_a_pipe,
    "a folder": lambda: os.open("/", os.O_RDONLY),
    "a socket": lambda: socket.socket().detach(),
    "empty memory": lambda: sparse(0),
    "a terabyte": lambda: sparse(1 << 40),
    "a little too much": lambda: sparse(packets.MEMORY_BYTES_MAX + 1),
    "memory that cannot be read": write_only,
}


@pytest.mark.parametrize("make", NO_MEMORY.values(), ids=list(NO_MEMORY))
def test_an_invalid_descriptor_leaks_nothing_and_the_socket_stays_usable(
    make: Callable[[], int],
) -> None:
    before, files = own_bytes(), len(list(Path("/proc/self/fd").iterdir()))
    here, there = packets.pair()
    descriptor = make()
    socket.send_fds(here, [b"@"], [descriptor])
    os.close(descriptor)
    packets.send(here, b"after it" * 100_000)
    received = packets.receive(there)
    assert received == b"@"
    with pytest.raises(WireError):
        said_by_rank(received)
    assert packets.receive(there) == b"after it" * 100_000
    here.close()
    assert packets.receive(there) is None
    there.close()
    assert own_bytes() - before < 64 * MIB
    assert len(list(Path("/proc/self/fd").iterdir())) == files
