"""A network of the benchmark's own: loopback in a new namespace, and a link speed put on it.

The namespace has no name: it is gone with the last process in it, however that ended. Whoever
enters it takes along the processes that are started inside; on the way out the caller is back in
the network it came from. The speed is a token bucket on loopback, which all ranks share.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

CLONE_NEWNET: Final = 0x40000000
BURST_BYTES: Final = 1 << 20
"""What passes at once: more than one segment of loopback (64 KiB), and far less than a model."""
QUEUE_BYTES: Final = 64 << 20
"""Nothing is ever dropped: TCP stops before so much waits."""
TOOL_S: Final = 10.0


def missing() -> str:
    """What this machine lacks for a network of its own; empty if nothing."""
    tools = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)}: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "root: a network namespace needs it"
    tried = subprocess.run(
        ["unshare", "--net", "tc", *_bucket(10**9)],
        capture_output=True,
        text=True,
        timeout=TOOL_S,
        check=False,
    )
    return "" if tried.returncode == 0 else f"a token bucket: {tried.stderr.strip()}"


def _bucket(bits_per_s: int) -> list[str]:
    rate = ["rate", f"{bits_per_s}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
    return ["qdisc", "replace", "dev", "lo", "root", "tbf", *rate]


class Link:
    """Loopback of the namespace that this process is in."""

    def limit(self, bits_per_s: int) -> None:
        _tool("tc", *_bucket(bits_per_s))

    def unlimit(self) -> None:
        _tool("tc", "qdisc", "replace", "dev", "lo", "root", "noqueue")


@contextmanager
def own_network() -> Iterator[Link]:
    """Call it without other threads: they would stay in the old network."""
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


def _refused() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def _tool(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=TOOL_S)
