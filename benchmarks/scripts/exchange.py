"""One end of a plain exchange over TCP: both ends send and receive the same bytes at once, no sums.

    exchange.py listen|connect HOST BYTES CALLS

The listener prints its port, then each prints one line of JSON: microseconds per call.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from typing import Final

TIME_LIMIT_S: Final = 60.0


def meet(role: str, host: str) -> socket.socket:
    """Return the connected socket; the listener first prints its port."""
    if role == "connect":
        port = int(sys.stdin.readline())
        return socket.create_connection((host, port), TIME_LIMIT_S)
    with socket.create_server((host, 0)) as server:
        server.settimeout(TIME_LIMIT_S)
        print(server.getsockname()[1], flush=True)
        return server.accept()[0]


def exchange(line: socket.socket, out: memoryview, into: memoryview) -> None:
    """Send and receive at the same time until both buffers are done."""
    sent = received = 0
    with selectors.DefaultSelector() as ready:
        ready.register(line, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while sent < len(out) or received < len(into):
            events = ready.select(TIME_LIMIT_S)
            if not events:
                raise TimeoutError(f"nothing moved for {TIME_LIMIT_S:.0f} s")
            mask = events[0][1]
            if mask & selectors.EVENT_WRITE:
                sent += line.send(out[sent:])
                if sent == len(out):
                    ready.modify(line, selectors.EVENT_READ)
            if mask & selectors.EVENT_READ:
                more = line.recv_into(into[received:])
                if not more:
                    raise ConnectionError("the other end has ended")
                received += more


def main() -> None:
    """Run the exchanges and print their times."""
    role, host, size, calls = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    line = meet(role, host)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out, into = memoryview(bytearray(size)), memoryview(bytearray(size))
    us = []
    for _ in range(1 + calls):
        line.setblocking(False)
        begun = time.monotonic_ns()
        exchange(line, out, into)
        us.append((time.monotonic_ns() - begun) / 1e3)
    line.close()
    print(json.dumps(us[1:]), flush=True)


main()
