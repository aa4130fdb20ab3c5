"""Two levels over a real network: two network namespaces with a link between them, two ranks each.

A namespace has no name; it ends with the process that holds it, and the link with both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transport.harness import Crew, ProcessPool, ProcessRank
from transport.rank_body import Payload
from transport.test_conformance import check_sum

TOOLS = ("ip", "nsenter", "unshare")
HOSTS = ("10.77.0.1", "10.77.0.2")
NUMEL = 4 << 20
CALLS = 4
FRAMES = 1.1
"""Headers and acknowledgements beside the bytes of the buffers."""

pytestmark = pytest.mark.processes


@contextmanager
def machines() -> Iterator[list[int]]:
    """Processes that hold a namespace each; `eth` in each leads to the other."""
    holders = [
        subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        for _ in HOSTS
    ]
    try:
        here = os.readlink("/proc/self/ns/net")  # noqa: PTH115 (not a path)
        for holder in holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == here:  # noqa: PTH115
                assert holder.poll() is None, "unshare"
        one, other = (str(holder.pid) for holder in holders)
        link = ["eth", "netns", one, "type", "veth", "peer", "name", "eth", "netns", other]
        subprocess.run(["ip", "link", "add", *link], check=True)
        for holder, host in zip(holders, HOSTS, strict=True):
            for words in (
                ["address", "add", f"{host}/24", "dev", "eth"],
                ["link", "set", "lo", "up"],
                ["link", "set", "eth", "up"],
            ):
                inside(holder.pid, "ip", *words)
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def inside(pid: int, *command: str) -> str:
    entered = ["nsenter", "--target", str(pid), "--net", *command]
    return subprocess.run(entered, check=True, capture_output=True, text=True).stdout


def sent(pid: int) -> int:
    """Bytes over the link so far, from there."""
    lines = inside(pid, "cat", "/proc/net/dev").splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth:"))


@pytest.mark.parametrize("kind", ["hier:mpi:ring", "hier:gloo"])
def test_each_byte_crosses_the_network_once_per_machine(pool: ProcessPool, kind: str) -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"needs root and {', '.join(TOOLS)}")
    with machines() as pids:
        ranks = [
            ProcessRank(pool, f"{place}{number}", ["nsenter", "--target", str(pid), "--net"], host)
            for number in range(2)
            for place, pid, host in zip("ab", pids, HOSTS, strict=True)
        ]
        try:
            pool.started(ranks)
            crew = Crew(kind, list(ranks))
            crew.open(crew.ranks)
            assert {rank.call("describe", kind).value["machines"] for rank in ranks} == {"2"}
            check_sum(crew, crew.ranks, Payload(1, (1, 7, 100_000)))
            before = [sent(pid) for pid in pids]
            check_sum(crew, crew.ranks, Payload(2, (NUMEL,), calls=CALLS))
            for pid, then in zip(pids, before, strict=True):
                assert sent(pid) - then < FRAMES * 4 * NUMEL * CALLS
            ranks[3].kill()
            crew.open(crew.ranks[:3])
            check_sum(crew, crew.ranks[:3], Payload(3, (100_000,)))
        finally:
            for rank in ranks:
                rank.kill()
