"""An agent learns of a rank's death and reports it, with real processes (D6, R25)."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest
from paceline.core.messages import AgentDone, AgentHello, KillRank, RankDead, RankStarted
from paceline_api.settings import FailureRuleSettings
from paceline_api.types.enums import FailureAction

from testing import still_clock
from testing.agent_harness import (
    PYTHON,
    RANK_SIDE,
    command_line,
    dead,
    descendants,
    gone,
    lives,
    member,
    pod,
    started,
    until,
)

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_kill_9_is_reported_at_once_as_evidence_from_the_kernel(
    tmp_path: Path, backend: str
) -> None:
    """Freeze the agent's clock, so that nothing it checks periodically could find the death."""
    program = [str(still_clock.__file__), "paceline.agent"]

    async def scenario() -> None:
        async with pod(tmp_path, ["sleep", "60"], backend=backend, program=program) as (
            _,
            coordinator,
        ):
            rank = await started(coordinator)
            assert command_line(rank.pid) == "sleep 60 "
            os.kill(rank.pid, signal.SIGKILL)
            evidence = await dead(coordinator)
            assert evidence.exit_code == -9
            assert evidence.restarts
            assert "SIGKILL" in evidence.why
            assert "memory" in evidence.why

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", ["mpiexec", "hydra_pmi_proxy", "shim.py"])
def test_killing_mpiexec_its_proxy_or_the_shim_leaves_no_orphan(
    tmp_path: Path, victim: str
) -> None:
    """Kill mpiexec, its proxy or the shim in turn.

    Without this rule the rank would live on unsupervised and join rounds while its agent believes
    that it is dead.
    """

    async def scenario() -> None:
        async with pod(tmp_path, ["sleep", "60"], backend="mpi") as (agent, coordinator):
            rank = await started(coordinator)
            below = descendants(agent.process.pid)
            assert rank.pid in below
            pids = [
                pid
                for pid, text in below.items()
                if (text.split()[0] if victim != "shim.py" else text).endswith(victim)
                or (victim == "shim.py" and text.startswith(PYTHON) and victim in text)
            ]
            assert len(pids) == 1, below
            os.kill(pids[0], signal.SIGKILL)
            evidence = await dead(coordinator)
            assert not lives(rank.pid), "evidence before the death"
            assert evidence.exit_code == -9
            assert "supervised" in evidence.why
            await gone(*below)

    asyncio.run(scenario())


def test_a_shell_is_not_reported_dead_before_its_children_are(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", "sleep 61 & echo child $!; wait"]

    async def scenario() -> None:
        async with pod(tmp_path, command) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed("child ")
            children = descendants(rank.pid)
            assert children
            os.kill(rank.pid, signal.SIGKILL)
            await dead(coordinator)
            assert not any(lives(pid) for pid in children)

    asyncio.run(scenario())


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_death_of_an_agent_ends_all_processes_below_it(tmp_path: Path, backend: str) -> None:
    """Run `sleep`, which never reads the pipe to its agent: the kernel must end it."""

    async def scenario() -> None:
        async with pod(tmp_path, ["sleep", "60"], backend=backend) as (agent, coordinator):
            await started(coordinator)
            below = descendants(agent.process.pid)
            assert below
            agent.signal(signal.SIGKILL)
            await agent.ended()
            await gone(*below)

    asyncio.run(scenario())


def test_a_rank_reads_the_end_of_its_pipe_when_its_agent_dies(tmp_path: Path) -> None:
    """Disable the parent death signal, so that the rank learns of it from the end of its pipe."""
    script = RANK_SIDE + (
        "import ctypes\n"
        "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"  # as if the kernel had no parent death signal
        "print('ready', flush=True)\n"
        "order = line.read()\n"
        f"open({str(tmp_path / 'read')!r}, 'w').write(repr(order))\n"
        "os._exit(0)\n"
    )

    async def scenario() -> None:
        async with pod(tmp_path, script) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed("ready")
            agent.signal(signal.SIGKILL)
            await agent.ended()
            await gone(rank.pid)
            assert (tmp_path / "read").read_text() == "None"

    asyncio.run(scenario())


def test_a_rank_that_the_coordinator_has_killed_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, ["sleep", "60"], procs=2) as (_, coordinator):
            other = await started(coordinator, 1)
            rank = await started(coordinator, 0)
            os.kill(rank.pid, signal.SIGSTOP)  # silent, and SIGTERM would not reach it
            await coordinator.order(KillRank(member(0), "silent for 10 s"))
            evidence = await dead(coordinator, 0)
            assert "silent for 10 s" in evidence.why
            assert evidence.restarts
            assert lives(other.pid)
            again = await started(coordinator, 0, restarts=1)
            assert again.pid != rank.pid

    asyncio.run(scenario())


def test_evidence_of_a_death_is_kept_until_the_coordinator_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, ["sleep", "60"], procs=2) as (_, coordinator):
            first = await started(coordinator, 0)
            await started(coordinator, 1)
            await coordinator.stop()
            os.kill(first.pid, signal.SIGKILL)
            await gone(first.pid)
            await coordinator.start()
            hello = await coordinator.wait(AgentHello, n=2)
            assert hello.dead == (member(0),)
            assert member(1) in hello.living
            assert (await dead(coordinator, 0)).exit_code == -9

    asyncio.run(scenario())


def test_an_agent_tries_all_addresses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, ["sleep", "60"], urls="http://127.0.0.1:1,http://127.0.0.1:2") as (
            agent,
            _,
        ):
            await agent.printed("127.0.0.1:2")
            assert "no coordinator at http://127.0.0.1:1" in agent.err.decode()

    asyncio.run(scenario())


def test_the_delay_before_a_restart_in_place_grows_each_time(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", "echo going wrong >&2; exit 3"]

    async def scenario() -> None:
        async with pod(tmp_path, command, backoff_limit=2) as (agent, coordinator):
            assert await agent.ended() == 1
            deaths = coordinator.all(RankDead)
            assert [m.member.attempt for m in deaths] == [1000, 1001, 1002]
            assert [m.restarts for m in deaths] == [True, True, False]
            assert all("going wrong" in m.why and "exit code 3" in m.why for m in deaths)
            times = [coordinator.time_of(m) for m in coordinator.all(RankStarted)]
            pauses_s = [(b - a) / 1e9 for a, b in itertools.pairwise(times)]
            assert pauses_s[0] >= 1.0, pauses_s
            assert pauses_s[1] >= 2.0, pauses_s
            done = coordinator.all(AgentDone)[-1]
            assert done.outcome == "failed"
            assert "backoffLimit 2" in done.message

    asyncio.run(scenario())


def test_a_failure_that_the_job_ignores_never_ends_the_pod(tmp_path: Path) -> None:
    """Set backoffLimit to 0 and let failurePolicy ignore the failure, so that it does not count."""
    rules = (FailureRuleSettings(FailureAction.IGNORE, (3,), ()),)

    async def scenario() -> None:
        command = ["/bin/sh", "-c", "exit 3"]
        async with pod(tmp_path, command, backoff_limit=0, rules=rules) as (_, coordinator):
            # Each process may have ended before anybody can look at it.
            await until(lambda: len(coordinator.all(RankDead)) >= 2, "two deaths")
            assert [m.restarts for m in coordinator.all(RankDead)][:2] == [True, True]

    asyncio.run(scenario())
