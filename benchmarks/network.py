"""Networks of a benchmark's own: loopback in a new namespace, or two machines and a link.

A network namespace here has no name, so it is gone with the last process in it, however that
process ended. Processes that are started inside a namespace stay in it. On the way out, the caller
is back in its old network. A token bucket limits the speed of a link: on loopback, which all ranks
share, or on each end of the link between two machines. This module imports nothing that a rival's
environment may lack.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

CLONE_NEWNET: Final = 0x40000000
BURST_BYTES: Final = 1 << 20
"""Burst of the bucket on loopback: more than one segment (64 KiB), and far less than a model."""
QUEUE_BYTES: Final = 64 << 20
"""Queue limit of a token bucket. Nothing is ever dropped: TCP stops before that much waits."""
TOOL_S: Final = 10.0
MACHINES: Final = ("10.77.0.1", "10.77.0.2")
LINE: Final = "eth"
"""Name of the network interface that leads from each machine to the other one."""
LINE_BURST_BYTES: Final = 128 << 10
"""Burst between machines: two segments, so that no reduction consists mostly of burst."""
FRAME_BYTES: Final = 9000
"""MTU as in the networks of clusters: less than one part in a hundred is headers."""


def missing() -> str:
    """Return what this machine lacks for a network of its own; empty if nothing."""
    tools = [tool for tool in ("ip", "nsenter", "tc", "unshare") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)}: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "root: a network namespace needs it"
    tried = subprocess.run(
        ["unshare", "--net", "tc", *_bucket("lo", 10**9, BURST_BYTES)],
        capture_output=True,
        text=True,
        timeout=TOOL_S,
        check=False,
    )
    return "" if tried.returncode == 0 else f"a token bucket: {tried.stderr.strip()}"


def _bucket(device: str, bits_per_s: int, burst_bytes: int) -> list[str]:
    rate = ["rate", f"{bits_per_s}bit", "burst", str(burst_bytes), "limit", str(QUEUE_BYTES)]
    return ["qdisc", "replace", "dev", device, "root", "tbf", *rate]


class Link:
    """Loopback of the network namespace that this process is in."""

    def limit(self, bits_per_s: int) -> None:
        """Limit the speed of loopback to this many bits per second."""
        _tool("tc", *_bucket("lo", bits_per_s, BURST_BYTES))

    def unlimit(self) -> None:
        """Remove the speed limit from loopback."""
        _tool("tc", "qdisc", "replace", "dev", "lo", "root", "noqueue")


@contextmanager
def own_network() -> Iterator[Link]:
    """Enter a new network namespace for the duration of the context.

    The process must have no other threads: they would stay in the old network.

    Yields:
        The loopback link of the new namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(CLONE_NEWNET):
            _refused()
        try:
            _tool("ip", "link", "set", "lo", "up")
            yield Link()
        finally:
            if libc.setns(home, CLONE_NEWNET):
                _refused()
    finally:
        os.close(home)


@dataclass(frozen=True)
class Machine:
    """Network namespace that stands for a machine, and the process that keeps it alive."""

    pid: int
    host: str

    @property
    def enter(self) -> tuple[str, ...]:
        """Command prefix that runs a command inside this machine's network."""
        return ("nsenter", "--target", str(self.pid), "--net")

    def tool(self, *argv: str) -> str:
        """Run a command inside this machine's network and return its output."""
        command = [*self.enter, *argv]
        return subprocess.run(
            command, check=True, timeout=TOOL_S, stdout=subprocess.PIPE, text=True
        ).stdout

    def sent_bytes(self) -> int:
        """Return the bytes sent over the line so far, headers of the kernel's packets included."""
        lines = self.tool("cat", "/proc/net/dev").splitlines()
        return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{LINE}:"))


@contextmanager
def two_machines(bits_per_s: int = 0) -> Iterator[tuple[Machine, ...]]:
    """Create two machines that are connected by a line.

    Args:
        bits_per_s: Speed of the line in each direction; 0 sets no limit.

    Yields:
        The two machines. Their networks are gone when the context ends.
    """
    holders = [
        subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        for _ in MACHINES
    ]
    try:
        here = os.readlink("/proc/self/ns/net")  # noqa: PTH115 (not a path)
        for holder in holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == here:  # noqa: PTH115
                assert holder.poll() is None, "unshare"
        machines = tuple(
            Machine(holder.pid, host) for holder, host in zip(holders, MACHINES, strict=True)
        )
        ends = [[LINE, "netns", str(holder.pid)] for holder in holders]
        _tool("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for machine in machines:
            machine.tool("ip", "link", "set", "lo", "up")
            machine.tool("ip", "address", "add", f"{machine.host}/24", "dev", LINE)
            machine.tool("ip", "link", "set", LINE, "mtu", str(FRAME_BYTES), "up")
            if bits_per_s:
                machine.tool("tc", *_bucket(LINE, bits_per_s, LINE_BURST_BYTES))
        yield machines
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def free_port() -> int:
    """Return a TCP port of loopback that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _refused() -> None:
    """Raise OSError with the errno of the last libc call."""
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def _tool(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=TOOL_S)
