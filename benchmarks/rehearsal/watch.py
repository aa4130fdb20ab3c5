"""Costs of a process, measured from outside: processor time, memory, bytes of its connections.

The kernel counts the bytes (sock_diag), with everything that TLS and web sockets add. The
coordinator itself does not know that it is measured.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h, linux/tcp.h
NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
REQUEST_DUMP: Final = 0x301
INET_DIAG_INFO: Final = 2
ESTABLISHED: Final = 1 << 1
HEADER: Final = struct.Struct("=IHHII")
QUERY: Final = struct.Struct("=BBBBI")
SOCKET_ID: Final = struct.Struct("!HH16s16s")
SOCKET_ID_REST: Final = struct.Struct("=III")
MESSAGE_BYTES: Final = 72
ATTRIBUTE: Final = struct.Struct("=HH")
BYTES: Final = struct.Struct("=QQ")
BYTES_AT: Final = 120
"""Offset of bytes_acked and bytes_received in tcp_info."""


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Traffic:
    """Number of open connections, and bytes received and sent so far."""

    connections: int
    received: int
    sent: int


class Listener:
    """Counts the bytes of the connections that end at one port of this machine.

    A connection that was closed since the last look keeps the count that it had then.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._counts: dict[tuple[bytes, int], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def look(self) -> Traffic:
        """Return the traffic so far; any thread may call this."""
        with self._lock:
            now = _connections(self._port)
            self._counts |= now
        received = sum(x for _, x in self._counts.values())
        sent = sum(x for x, _ in self._counts.values())
        return Traffic(len(now), received, sent)


def _connections(port: int) -> dict[tuple[bytes, int], tuple[int, int]]:
    """Return bytes acknowledged and received by cookie and port of the other end."""
    ends = SOCKET_ID.pack(port, 0, bytes(16), bytes(16)) + SOCKET_ID_REST.pack(0, 0, 0)
    query = QUERY.pack(socket.AF_INET, socket.IPPROTO_TCP, 1 << INET_DIAG_INFO - 1, 0, ESTABLISHED)
    body = query + ends
    header = HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0)
    by_end: dict[tuple[bytes, int], tuple[int, int]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as line:
        line.settimeout(5.0)
        line.send(header + body)
        while True:
            data = line.recv(1 << 20)
            while data:
                length, kind, *_ = HEADER.unpack_from(data)
                if kind == NLMSG_DONE:
                    return by_end
                if kind == NLMSG_ERROR:
                    raise OSError("the kernel refuses to list connections (sock_diag)")
                _take(by_end, data[HEADER.size : length], port)
                data = data[-(-length // 4) * 4 :]


def _take(by_end: dict[tuple[bytes, int], tuple[int, int]], message: bytes, port: int) -> None:
    ours, theirs, _, _ = SOCKET_ID.unpack_from(message, 4)
    if ours != port:
        return
    cookie = message[4 + SOCKET_ID.size + 4 :][:8]
    at = MESSAGE_BYTES
    while at + ATTRIBUTE.size <= len(message):
        length, kind = ATTRIBUTE.unpack_from(message, at)
        if kind == INET_DIAG_INFO:
            by_end[cookie, theirs] = BYTES.unpack_from(message, at + ATTRIBUTE.size + BYTES_AT)
        at += max(ATTRIBUTE.size, -(-length // 4) * 4)
