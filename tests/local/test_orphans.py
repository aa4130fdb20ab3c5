"""The runner kills the processes that a killed agent leaves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

RUNNER = """
import asyncio, os, signal, subprocess, sys
from pathlib import Path
from paceline.local.processes import adopt_orphans, kill_orphans

async def scenario():
    adopt_orphans(True)
    command = [sys.executable, "-c", AGENT]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, close_fds=False)
    left = [Path("/dev/shm", name) for name in agent.stdout.readline().split()]
    there = all(path.exists() for path in left)
    agent.kill()
    agent.wait()
    killed = await kill_orphans(set)
    print(len(left), there, killed, [str(path) for path in left if path.exists()])

asyncio.run(scenario())
"""
AGENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", RANK], close_fds=False)
"""
RANK = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory
turn = multiprocessing.get_context("spawn").Lock()
memory = SharedMemory(create=True, size=4096)
print(turn._semlock.name.replace("/", "sem."), memory.name, flush=True)
time.sleep(600)
"""
STAYS = """
import os, subprocess, sys, time
command = "from multiprocessing.resource_tracker import main;main(0)"  # reads from stdin
subprocess.Popen([sys.executable, "-c", command], stdin=HELD, pass_fds=[HELD])
print(flush=True)
time.sleep(600)
"""


def left_by(rank: str, held: int | None = None) -> str:
    """Let a runner clean up after an agent with this rank, and return its output."""
    agent = AGENT.replace("RANK", repr(rank))
    ran = subprocess.run(
        [sys.executable, "-c", RUNNER.replace("AGENT", repr(agent))],
        capture_output=True,
        text=True,
        check=True,
        pass_fds=() if held is None else (held,),
    )
    return ran.stdout.strip()


def test_shared_memory_of_multiprocessing_is_removed_with_a_killed_agent() -> None:
    output = left_by(RANK)
    # The rank is killed, and who cleans up after it only if that takes longer than CLEANERS_S.
    assert output in ("2 True 1 []", "2 True 2 []")


def test_a_resource_tracker_that_does_not_end_is_killed() -> None:
    reads, writes = os.pipe()
    try:
        rank = STAYS.replace("HELD", str(reads))
        assert left_by(rank, reads) == "0 True 2 []", "nobody else than this test ends it"
    finally:
        os.close(reads)
        os.close(writes)
