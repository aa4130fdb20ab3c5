"""Injected faults hit the right process, once, when they are due; with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from paceline.core.faults import parse_faults
from paceline.local.faults import Injector
from paceline_api.ids import MemberId
from paceline_api.status import RankPhase, RankStatus, Status

pytestmark = pytest.mark.processes


class FakeCluster:
    """Stands in for the cluster and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def grow(self, replicas: int) -> None:
        self.calls.append(f"grow {replicas}")

    def terminate(self, slot: int) -> bool:
        self.calls.append(f"terminate {slot}")
        return slot == 1

    def kill_coordinator(self) -> None:
        self.calls.append("kill coordinator")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as sleeper:
        yield sleeper
        sleeper.kill()


def status(version: int, *pids: int, state: RankPhase = RankPhase.ACTIVE) -> Status:
    ranks = (RankStatus(MemberId(n // 2, n % 2, 0), state, pid=p) for n, p in enumerate(pids))
    return Status(job="job", coordinator="a", procs=2, version=version, ranks=tuple(ranks))


def injector(text: str) -> tuple[Injector, FakeCluster, list[str]]:
    cluster, messages = FakeCluster(), list[str]()
    return Injector(parse_faults(text), cluster, messages.append), cluster, messages


def test_a_kill_is_injected_once_when_its_round_is_due(process: subprocess.Popen[bytes]) -> None:
    faults, _, messages = injector("kill:rank=2,at=round:5")
    faults.look(status(4, 0, 0, process.pid), 0)
    assert process.poll() is None
    faults.look(status(6, 0, 0, process.pid), 0)
    assert process.wait(60) == -signal.SIGKILL
    assert messages == ["injected kill:rank=2,at=round:5 at round 6"]
    # Its successor in the same place is not killed.
    faults.look(status(7, 0, 0, os.getpid()), 0)
    assert len(messages) == 1


@pytest.mark.parametrize("state", [RankPhase.DEAD, RankPhase.FINISHED])
def test_a_fault_waits_until_its_rank_is_alive(
    process: subprocess.Popen[bytes], state: RankPhase
) -> None:
    faults, _, messages = injector("kill:rank=0,at=round:1")
    faults.look(status(1, process.pid, state=state), 0)
    faults.look(status(1, 0), 0)
    assert process.poll() is None
    assert messages == []
    faults.look(status(9, process.pid), 0)
    assert process.wait(60) == -signal.SIGKILL


def test_an_injected_sigterm_goes_to_the_replica_like_an_eviction() -> None:
    faults, cluster, messages = injector("sigterm:rank=3,at=round:1;sigterm:rank=0,at=round:1")
    faults.look(status(1, 5, 6, 7, 8), 0)
    assert cluster.calls == ["terminate 1", "terminate 0"]
    assert len(messages) == 1, "replica 0 has no agent now"
    faults.look(status(2, 5, 6, 7, 8), 0)
    assert cluster.calls[2:] == ["terminate 0"]


def test_a_freeze_ends_after_its_duration(process: subprocess.Popen[bytes]) -> None:
    async def go() -> None:
        faults, _, _ = injector("freeze:rank=0,at=time:1s,for=20ms")
        faults.look(status(0, process.pid), 999_999_999)
        assert faults.next_ns() == 10**9, "it is not due yet"
        faults.look(status(0, process.pid), 10**9)
        assert faults.next_ns() is None
        async with asyncio.timeout(60.0):
            stopped = await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(stopped[1])
            goes_on = await asyncio.to_thread(os.waitpid, process.pid, os.WCONTINUED)
            assert os.WIFCONTINUED(goes_on[1])

    asyncio.run(go())


def test_the_injector_leaves_faults_of_the_ranks_to_the_ranks() -> None:
    text = "join:at=round:3,n=2;coordinator-kill:at=round:4;slow:rank=0,ms=5;nan:rank=0,at=round:1"
    faults, cluster, messages = injector(text)
    faults.look(status(3), 0)
    assert cluster.calls == ["grow 2"]
    faults.look(status(4), 0)
    assert cluster.calls == ["grow 2", "kill coordinator"]
    assert len(messages) == 2
