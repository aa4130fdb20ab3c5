"""Reservation of machine resources for one test cluster: a number, and names derived from it.

Several clusters may run at once: two checkouts, or a cluster kept by hand beside a test run. Each
takes the lowest free number by locking a file; folder, address range, bridge and control groups
follow from the number. The kernel drops the lock with the process that holds it. So anything that
exists under the names of a number that was just taken is left over from a killed run, and is
removed. Releasing a number removes its lock file; the last release also removes the shared folder.
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
    """Raised when all numbers, or all ports of a number, are taken."""


@dataclass
class Instance:
    """One number, held until `release`."""

    index: int
    folder: Path
    _lock: IO[str]

    @property
    def name(self) -> str:
        """Name of the bridge and of the control groups of this cluster."""
        return f"paceline{self.index}"

    def address(self, rest: str) -> str:
        """Return an address in this instance's range: "0.1" becomes 10.100.0.1 for number 0."""
        return f"10.{100 + self.index}.{rest}"

    @property
    def host_address(self) -> str:
        """Address at which nodes and pods reach the programs on the host."""
        return self.address("0.1")

    @property
    def pod_range(self) -> str:
        """Addresses of pods on real nodes."""
        return self.address("0.0/17")

    @property
    def fake_pod_range(self) -> str:
        """Addresses of pods on fake nodes."""
        return self.address("64.0/18")

    @property
    def service_range(self) -> str:
        """Addresses of Services."""
        return self.address("128.0/20")

    @property
    def dns_address(self) -> str:
        """Address of the DNS Service."""
        return self.address("128.10")

    def free_port(self) -> int:
        """Reserve and return a port that nothing listens on, below the kernel's ephemeral ports."""
        first = PORTS.start + self.index * (len(PORTS) // INSTANCES_MAX)
        for port in range(first, PORTS.stop):
            with socket.socket() as probe:
                # Servers set this option too: a port with connections in TIME_WAIT is free.
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
        """Clean up and give the number back; all programs of the cluster must have ended."""
        leftovers.remove(self.name, self.folder, keep_logs=keep_logs)
        Path(self._lock.name).unlink()
        self._lock.close()
        with contextlib.suppress(OSError):  # not empty: another cluster runs, or logs are kept
            base_folder().rmdir()


def base_folder() -> Path:
    """Return the folder that holds the lock files and folders of all this user's clusters."""
    # The path is short, since sockets lie below it and a socket's path has at most 107 bytes.
    return Path("/tmp") / f"paceline-clusters-{os.getuid()}"


def acquire() -> Instance:
    """Take the lowest free number."""
    for index in range(INSTANCES_MAX):
        if room := take(index):
            return room
    raise NoRoomError(f"{INSTANCES_MAX} clusters run already; see {base_folder()}")


def take(index: int) -> Instance | None:
    """Take this number with an empty folder, or return None if another process holds it."""
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
        # The last holder may have removed the file before it released the lock. A lock on a removed
        # file excludes nobody.
        if os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()
