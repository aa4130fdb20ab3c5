"""Room on this machine for one test cluster: a number, and all names that follow from it.

Several clusters may run at once (two checkouts, a cluster kept by hand beside a test run). Each
takes the lowest free number by a lock on a file; folder, address range, bridge and control groups
follow from the number. The lock falls with the process that holds it, so whoever takes a number
next knows that anything still there under its names is left of a killed run, and removes it.
Releasing a number removes its lock file, and the last one to do so removes the folder of all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from testing.cluster import leftovers

INSTANCES_MAX = 8
# Outside the range from which the kernel gives ports to outgoing connections: an API server that
# is stopped for a while must get its port back.
PORTS = range(20000, 32000)


class NoRoomError(Exception):
    """All numbers are taken."""


@dataclass
class Instance:
    """One number, held until `release`."""

    index: int
    folder: Path
    _lock: IO[str]

    @property
    def name(self) -> str:
        return f"paceline{self.index}"

    def address(self, rest: str) -> str:
        """An address of this instance's range: address("0.1") -> 10.100.0.1 for number 0."""
        return f"10.{100 + self.index}.{rest}"

    @property
    def host_address(self) -> str:
        """Where the programs on the host are reached from nodes and pods."""
        return self.address("0.1")

    @property
    def pod_range(self) -> str:
        return self.address("0.0/17")

    @property
    def fake_pod_range(self) -> str:
        return self.address("64.0/18")

    @property
    def service_range(self) -> str:
        return self.address("128.0/20")

    @property
    def dns_address(self) -> str:
        return self.address("128.10")

    def free_port(self) -> int:
        first = PORTS.start + self.index * (len(PORTS) // INSTANCES_MAX)
        for port in range(first, PORTS.stop):
            with socket.socket() as probe:
                # As servers do: a port whose last connection still lingers is free to listen on.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("0.0.0.0", port))
                except OSError:
                    continue
                if port not in self._ports:
                    self._ports.add(port)
                    return port
        raise NoRoomError(f"no free port from {first} to {PORTS.stop - 1}")

    def __post_init__(self) -> None:
        self._ports: set[int] = set()

    def release(self, *, keep_logs: bool) -> None:
        """Give the number back; every program of it must have ended."""
        leftovers.remove(self.name, self.folder, keep_logs=keep_logs)
        Path(self._lock.name).unlink()
        self._lock.close()
        with contextlib.suppress(OSError):  # not empty: another cluster runs, or logs are kept
            base_folder().rmdir()


def base_folder() -> Path:
    # Short, since sockets lie below it, and their paths may have 107 bytes.
    return Path("/tmp") / f"paceline-clusters-{os.getuid()}"


def acquire() -> Instance:
    """The lowest free number."""
    for index in range(INSTANCES_MAX):
        if room := take(index):
            return room
    raise NoRoomError(f"{INSTANCES_MAX} clusters run already; see {base_folder()}")


def take(index: int) -> Instance | None:
    """This number with an empty folder, unless somebody holds it."""
    base = base_folder()
    lock = _locked(base / f"{index}.lock")
    if lock is None:
        return None
    room = Instance(index, base / str(index), lock)
    leftovers.remove(room.name, room.folder, keep_logs=False)
    room.folder.mkdir()
    return room


def _locked(path: Path) -> IO[str] | None:
    """Create the file and lock it; return None if another process holds the lock."""
    while True:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = path.open("a+")
        except FileNotFoundError:  # the last cluster that ended has just removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        # Whoever held the lock may have removed the file before it released it. A lock on a removed
        # file holds nobody off.
        if os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()
