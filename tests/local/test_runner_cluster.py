"""The processes of the local runner are kept alive, replaced, scaled and ended; with real agents.

The ranks only sleep, because nothing here needs training: the tests show which processes are
restarted, what the coordinator is told, and that nothing is left over.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from paceline.local import cluster as cluster_module
from paceline.local.client import Client, CoordinatorAwayError
from paceline.local.cluster import ASK_S, Cluster
from paceline.local.processes import children_of
from paceline_api.reading.load import parse_job
from paceline_api.resolve import resolve
from paceline_api.status import RankPhase, Status

from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

WAIT_S = 120.0
JOB = """
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: sleepers}
spec:
  replicas: 2
  collective: {backend: gloo}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [sleep, "1000"]}]
"""


def with_cluster(folder: Path, act: Callable[[Cluster, Client], Coroutine[Any, Any, None]]) -> None:
    """Run `act` against a living cluster; no process of it may be left afterwards."""
    before = set(children_of(os.getpid()))
    lines: list[str] = []

    async def go() -> None:
        cluster = Cluster(
            resolve(parse_job(JOB)),
            run_dir=folder,
            working_dir=folder,
            faults=(),
            temporary=folder,
            on_line=lambda name, line: lines.append(f"[{name}] {line}"),
        )
        async with cluster, Client(cluster.url, cluster.operator_token) as client:
            follow = asyncio.create_task(_follow(cluster, client))
            await act(cluster, client)
            follow.cancel()
            assert not cluster.broken.done()

    try:
        asyncio.run(asyncio.wait_for(go(), 2 * WAIT_S))
    except BaseException as error:
        error.add_note("\n".join(["the cluster printed:", *lines]))
        raise
    assert set(children_of(os.getpid())) == before


async def _follow(cluster: Cluster, client: Client) -> None:
    """Handle each status like the runner, so that a new coordinator learns the inventory."""
    seq = None
    while True:
        try:
            status = await client.status(after=seq, wait_s=5.0)
            seq = status.seq
            cluster.take_status(status)
        except CoordinatorAwayError:
            await asyncio.sleep(0.05)


async def wait_until(client: Client, want: Callable[[Status], bool]) -> Status:
    status, seq = None, None
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    status = await client.status(after=seq, wait_s=5.0)
                except CoordinatorAwayError:
                    await asyncio.sleep(0.05)
                    continue
                seq = status.seq
                if want(status):
                    return status
    except TimeoutError:
        raise AssertionError(f"never seen; last: {status}") from None


def living(status: Status) -> dict[tuple[int, int], int]:
    """Return the pids of living ranks by (slot, attempt of the pod)."""
    return {
        (rank.member.slot, rank.member.attempt // 1000): rank.pid
        for rank in status.ranks
        if rank.state is not RankPhase.DEAD and rank.pid
    }


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_killed_agent_is_replaced_and_its_frozen_rank_ends_with_it(tmp_path: Path) -> None:
    async def act(cluster: Cluster, client: Client) -> None:
        status = await wait_until(client, lambda s: set(living(s)) == {(0, 0), (1, 0)})
        rank = living(status)[1, 0]
        # A stopped process cannot react to the end of its agent, so it must be killed.
        os.kill(rank, signal.SIGSTOP)
        agent = next(child for child in cluster.agents if child.name == "agent-1-0")
        agent.signal(signal.SIGKILL)
        after = await wait_until(client, lambda s: set(living(s)) == {(0, 0), (1, 1)})
        assert not exists(rank)
        assert after.inventory > status.inventory
        dead = [rank for rank in after.ranks if rank.state is RankPhase.DEAD]
        assert [(rank.member.slot, rank.member.attempt) for rank in dead] == [(1, 0)]

    with_cluster(tmp_path, act)


def test_a_restarted_coordinator_learns_the_ranks_and_the_inventory(tmp_path: Path) -> None:
    async def act(cluster: Cluster, client: Client) -> None:
        before = await wait_until(client, lambda s: len(living(s)) == 2 and s.inventory >= 2)
        ranks = living(before)
        cluster.kill_coordinator()
        after = await wait_until(
            client,
            lambda s: (
                s.coordinator != before.coordinator
                and s.inventory == before.inventory
                and {rank.member for rank in s.ranks} == {rank.member for rank in before.ranks}
            ),
        )
        assert after.replicas == 2
        assert all(exists(pid) for pid in ranks.values()), "a rank ended with the coordinator"

    with_cluster(tmp_path, act)


def test_scaling_up_starts_agents_and_scaling_down_asks_the_coordinator(
    tmp_path: Path,
) -> None:
    async def act(cluster: Cluster, client: Client) -> None:
        await wait_until(client, lambda s: len(living(s)) == 2)
        cluster.grow(1)
        three = await wait_until(client, lambda s: len(living(s)) == 3)
        assert (set(living(three)), three.replicas) == ({(0, 0), (1, 0), (2, 0)}, 3)
        cluster.scale(2)
        status = await wait_until(client, lambda s: s.replicas == 2)
        assert len(cluster.agents) == 3, "the runner itself ends nobody"
        assert any(happening.reason == "Draining" for happening in status.history)

    with_cluster(tmp_path, act)


@pytest.mark.exhaustive
def test_many_replicas_are_started_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit the starts: 50 at once on two cores used to block runner and coordinator for 20 s."""
    monkeypatch.setattr(cluster_module, "STARTING_MAX", 1)

    async def act(cluster: Cluster, client: Client) -> None:
        assert len(cluster.agents) == 1
        # The task that follows the coordinator may not have received this status yet.
        cluster.take_status(await wait_until(client, lambda s: len(living(s)) == 2))
        cluster.scale(3)
        assert len(cluster.agents) == 3, "the two before are up"
        await wait_until(client, lambda s: len(living(s)) == 3)

    with_cluster(tmp_path, act)


@pytest.mark.exhaustive
def test_an_agent_that_never_comes_up_does_not_block_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "STARTING_MAX", 1)

    async def act(cluster: Cluster, client: Client) -> None:
        [first] = cluster.agents
        first.signal(signal.SIGSTOP)
        # Only now, since a busy machine needs longer to come here.
        monkeypatch.setattr(cluster_module, "STARTING_NS", 10**9)
        cluster._start_missing()
        await wait_until(client, lambda s: (1, 0) in living(s))

    with_cluster(tmp_path, act)


def test_all_processes_end_with_the_block_even_right_after_the_start(tmp_path: Path) -> None:
    async def act(cluster: Cluster, client: Client) -> None:
        assert len(cluster.agents) == 2

    with_cluster(tmp_path, act)


@pytest.mark.exhaustive
def test_processes_of_an_ended_agent_are_not_reported_as_left_over(tmp_path: Path) -> None:
    """End the run while the processes of an agent are being reaped."""

    async def act(cluster: Cluster, client: Client) -> None:
        await wait_until(client, lambda s: len(living(s)) == 2)
        agents = cluster.agents
        for agent in agents:
            agent.signal(signal.SIGKILL)
        await asyncio.gather(*(agent.ended() for agent in agents))
        await cluster.end(grace_s=0.0)
        assert not cluster.left_over

    with_cluster(tmp_path, act)


@pytest.mark.parametrize("away", exhaustive_except(["stopped"], ["killed", "stopped"]))
def test_nothing_is_started_after_the_release(tmp_path: Path, away: str) -> None:
    """Restart or stop the coordinator, which then does not know of the release (R17)."""

    async def act(cluster: Cluster, client: Client) -> None:
        status = await wait_until(client, lambda s: set(living(s)) == {(0, 0), (1, 0)})
        cluster.take_status(replace(status, stopping=True))
        coordinator = cluster._coordinator
        assert coordinator is not None
        if away == "killed":
            cluster.kill_coordinator()
            await wait_until(client, lambda s: s.coordinator != status.coordinator)
        else:
            coordinator.signal(signal.SIGSTOP)
        agent = next(child for child in cluster.agents if child.name == "agent-1-0")
        agent.signal(signal.SIGKILL)
        await agent.ended()
        await asyncio.sleep(1.5 * ASK_S)
        cluster.grow(1)
        assert [child.name for child in cluster.agents] == ["agent-0-0"]
        assert not (tmp_path / "agent-1-1.log").exists()
        coordinator.signal(signal.SIGCONT)

    with_cluster(tmp_path, act)
