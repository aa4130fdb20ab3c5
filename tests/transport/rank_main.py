"""A rank in its own process below `mpiexec -n 1`.

It is forked (`rank_guard`), or executed as `python rank_main.py ADDRESS NAME`. Commands come over a
socket. One thread reads them, so that an abort reaches a rank that is inside a call; the main
thread, which is the communication thread here, executes them.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from multiprocessing.connection import Client
from typing import Any

from paceline.core.collectives.select import Method
from paceline.transport.base import Transport

from tests.transport.rank_body import ROUNDED, RankBody


def make(kind: str) -> Transport:
    from paceline.transport.factory import LOOPBACK, make_transport

    host = os.environ["RANK_HOST"]

    match Method.of(kind).transport.removesuffix(ROUNDED):
        case "mpi":
            from paceline.transport.mpi.transport import MpiTransport

            return MpiTransport(host=host)
        case "mpi-mixed":
            from tests.transport.mixed import MixedMpiTransport

            return MixedMpiTransport(host=host)
        case "gloo":
            from paceline.transport.torch.gloo import GlooTransport

            return GlooTransport(host=host)
        case "shm":
            from paceline.transport.shm.memory import SharedMemory
            from paceline.transport.shm.transport import ShmTransport

            return ShmTransport(SharedMemory())
        case "shm-mixed":
            from paceline.transport.shm.memory import SharedMemory
            from paceline.transport.shm.transport import ShmTransport

            return ShmTransport(SharedMemory(), native=int(sys.argv[2][1:]) % 2 == 0)
        case "hier:mpi" | "hier:gloo" as name:
            from paceline.transport.shm.hier import HierTransport
            from paceline.transport.shm.memory import SharedMemory

            # Simulate two machines on loopback: two or three of the ranks of a test are on each.
            place = f"machine-{int(sys.argv[2][1:]) % 2}" if host == LOOPBACK else ""
            return HierTransport(SharedMemory(), make(name.removeprefix("hier:")), place=place)
        case name:
            return make_transport(name, local=True)


def main(*words: str) -> None:
    sys.argv[1:] = words
    address, name = words
    connection = Client(address, "AF_UNIX")
    connection.send((name, os.getpid()))
    body = RankBody(make, tell=connection.send)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                command = connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # the test has ended: exit without finalizing MPI (D6)
            if command[0] == "raise_abort":
                body.raise_abort()
            else:
                commands.put(command)

    threading.Thread(target=read, daemon=True).start()
    while True:
        connection.send(body.run(*commands.get()))


if __name__ == "__main__":
    main(*sys.argv[1:])
