"""The start, the drain and the end of the ranks of a pod, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from paceline.core.messages import AgentDone, AgentHello, DrainPod, RankDead, Shutdown
from paceline.environment import AgentSettings, RankSettings, SettingsError
from paceline_api.ids import GenerationId
from prometheus_client.parser import text_string_to_metric_families

from testing.agent_harness import RANK_SIDE, descendants, gone, member, pod, started, until

pytestmark = pytest.mark.processes

DRAINS = RANK_SIDE + (
    "print('ready', flush=True)\n"
    "order = line.read()\n"
    "print('asked to', order.kind, 'because of', order.why, flush=True)\n"
    "import time; time.sleep(0.3)\n"
    "line.tell('dismissed')\n"
)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_pod_ends_with_code_0_when_its_ranks_have_finished(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        script = RANK_SIDE + "print('done', flush=True); line.tell('finished'); os._exit(0)\n"
        async with pod(tmp_path, script, procs=2, backend=backend) as (agent, coordinator):
            assert await agent.ended() == 0
            done = coordinator.all(AgentDone)
            assert [m.outcome for m in done] == ["finished"]
            assert {m.member for m in coordinator.all(RankDead)} == {member(0), member(1)}
            assert not any(m.restarts for m in coordinator.all(RankDead))
            assert b"[rank 2.0#1000] done\n" in agent.out
            assert b"[rank 2.1#1000] done\n" in agent.out

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_pod_and_a_second_one_does_not_cut_it_short(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, DRAINS) as (agent, coordinator):
            await agent.printed("ready")
            agent.signal(number)
            await agent.printed("asked to drain because of " + number.name)
            agent.signal(number)
            assert await agent.ended() == 0
            assert agent.out.count(b"asked to") == 1
            assert coordinator.all(AgentDone)[-1].outcome == "drained"
            assert coordinator.all(RankDead)[-1].exit_code == 0

    asyncio.run(scenario())


def test_the_exit_code_after_a_drain_by_a_signal_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DRAINED_EXIT_CODE", "143")

    async def scenario() -> None:
        async with pod(tmp_path, DRAINS) as (agent, coordinator):
            await agent.printed("ready")
            agent.signal(signal.SIGTERM)
            assert await agent.ended() == 143
            assert coordinator.all(AgentDone)[-1].outcome == "drained"
            assert b"ERROR" not in agent.err

    asyncio.run(scenario())


def test_a_pod_that_the_coordinator_drains_exits_with_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DRAINED_EXIT_CODE", "143")  # applies to drains by a signal only

    async def scenario() -> None:
        async with pod(tmp_path, DRAINS) as (agent, coordinator):
            await agent.printed("ready")
            await coordinator.order(DrainPod("scale-down"))
            assert await agent.ended() == 0
            assert b"because of scale-down" in agent.out

    asyncio.run(scenario())


def test_a_rank_that_does_not_leave_within_the_drain_grace_is_killed(tmp_path: Path) -> None:
    script = RANK_SIDE + (
        "line.tell('present'); print('ready', flush=True); import time; time.sleep(60)\n"
    )

    async def scenario() -> None:
        async with pod(tmp_path, script, drain_grace_s=0.3) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed("ready")
            agent.signal(signal.SIGTERM)
            assert await agent.ended() == 1
            await gone(rank.pid)
            done = coordinator.all(AgentDone)[-1]
            assert done.outcome == "drained"
            assert "did not leave in time (SIGTERM)" in done.message

    asyncio.run(scenario())


def test_a_finished_rank_can_still_save_after_the_job_is_complete(tmp_path: Path) -> None:
    script = RANK_SIDE + (
        "line.tell('finished'); print('saving', flush=True); line.read()\n"
        "print('saved', flush=True); os._exit(0)\n"
    )

    async def scenario() -> None:
        async with pod(tmp_path, script) as (agent, coordinator):
            await agent.printed("saving")
            await coordinator.order(Shutdown("the job is complete"))
            assert await agent.ended() == 0
            assert b"saved" in agent.out
            assert coordinator.all(AgentDone)[-1].outcome == "finished"

    asyncio.run(scenario())


def test_an_agent_reports_a_release_to_a_restarted_coordinator(tmp_path: Path) -> None:
    """Stop the coordinator before the rank ends.

    Only the agent can then report to the restarted coordinator that the job is complete (R17).
    """
    script = RANK_SIDE + (
        "import time\n"
        "from pathlib import Path\n"
        "from paceline_api.ids import GenerationId\n"
        "last = settings.member.local == 1\n"
        "print('ready', flush=True)\n"
        "while last or not Path('go').exists(): time.sleep(0.01)\n"
        "line.tell('finished', released=(GenerationId(3, 'uid', 4), 17)); os._exit(0)\n"
    )

    async def scenario() -> None:
        async with pod(tmp_path, script, procs=2, working_dir=str(tmp_path)) as (_, coordinator):
            rank = await started(coordinator, 0)
            assert (await coordinator.wait(AgentHello)).released is None
            await coordinator.stop()
            (tmp_path / "go").touch()
            await gone(rank.pid)
            await coordinator.start()
            hello = await coordinator.wait(AgentHello, lambda m: member(0) in m.dead)
            assert hello.released == (GenerationId(3, "uid", 4), 17)
            assert hello.living == (member(1),)
            dead = await coordinator.wait(RankDead)
            assert dead.released == hello.released
            assert dead.why == ""

    asyncio.run(scenario())


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_command_that_is_not_found_ends_the_pod_with_a_hint(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, ["pyhton", "train.py"], backend=backend) as (agent, coordinator):
            assert await agent.ended() == 2
            message = coordinator.all(AgentDone)[-1].message
            assert message.startswith('rank 2.0#1000: command not found: there is no "pyhton"')
            assert "hint: see command of the container trainer" in message
            assert "Traceback" not in agent.err.decode()
            assert not coordinator.all(RankDead)[-1].restarts

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("print('hello')", 1, "ScriptTookNoPart"),
        ("import sys; sys.exit('quorum is above the replicas') if 0 else sys.exit(2)", 2, "code 2"),
        (RANK_SIDE + "line.tell('failed', 'GradScaler is not supported'); os._exit(2)", 2, "Grad"),
        (RANK_SIDE + "line.tell('finished'); raise OSError('disk full')", 1, "disk full"),
    ],
)
def test_a_failure_that_no_restart_would_fix_ends_the_pod(
    tmp_path: Path, script: str, code: int, reason: str
) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, script) as (agent, coordinator):
            assert await agent.ended() == code
            done = coordinator.all(AgentDone)[-1]
            assert done.outcome == "failed"
            assert reason in done.message
            assert len(coordinator.all(RankDead)) == 1

    asyncio.run(scenario())


def test_a_rank_that_is_not_restarted_drains_the_others_of_its_pod(tmp_path: Path) -> None:
    script = DRAINS.replace(
        "print('ready'", "settings.member.local == 1 and os._exit(2)\nprint('ready'"
    )

    async def scenario() -> None:
        async with pod(tmp_path, script, procs=2) as (agent, coordinator):
            assert await agent.ended() == 2
            done = coordinator.all(AgentDone)[-1]
            assert done.outcome == "failed"
            assert done.message.startswith("rank 2.1#1000")

    asyncio.run(scenario())


def test_a_rank_gets_its_settings_arguments_and_working_directory(tmp_path: Path) -> None:
    script = (
        "import json, os, sys\n"
        "json.dump([dict(os.environ), sys.argv[1:], os.getcwd()], open('seen.json', 'w'))\n"
    )
    (tmp_path / "work").mkdir()
    (tmp_path / "see.py").write_text(script)
    command = ["python3", "../see.py", ":", "$(DATA)/x", "$$(DATA)", "$(NOBODY)", "-n 2"]

    async def scenario() -> None:
        async with pod(
            tmp_path,
            command,
            backend="mpi",  # hydra would read ":" as the start of a second program
            env=(("DATA", "/data"), ("SUB", "$(DATA)/sub"), ("PACELINE_JOB", "forged")),
            working_dir=str(tmp_path / "work"),
        ) as (agent, _):
            await agent.ended()

    asyncio.run(scenario())
    env, args, folder = json.loads((tmp_path / "work" / "seen.json").read_text())
    assert args == [":", "/data/x", "$(DATA)", "$(NOBODY)", "-n 2"]
    assert folder == str(tmp_path / "work")
    assert env["SUB"] == "/data/sub"
    assert env["PMI_RANK"] == "0"
    assert not [name for name in env if "SHIM" in name]
    settings = RankSettings.from_environment(env)
    assert settings is not None
    assert (settings.job, settings.member, settings.local) == ("digits", member(), True)
    assert settings.faults == "slow:rank=0,ms=1"


def test_no_output_is_lost(tmp_path: Path) -> None:
    """Write more than the pipes and the agent hold, then kill the writer."""
    script = (
        "import os, sys\n"
        "for i in range(40_000): print('line', i)\n"
        "sys.stdout.write('without an end'); sys.stdout.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )

    async def scenario() -> None:
        async with pod(tmp_path, script, backoff_limit=0) as (agent, _):
            assert await agent.ended() == 1
            lines = agent.out.decode().splitlines()
            assert [f"[rank 2.0#1000] line {i}" for i in range(40_000)] == lines[:-1]
            assert lines[-1] == "[rank 2.0#1000] without an end"
            kept = (agent.run_dir / "logs" / "rank-2.0-1000.log").read_text()
            assert kept.count("\n") == 40_001

    asyncio.run(scenario())


def test_no_process_outlives_the_agent(tmp_path: Path) -> None:
    """Include a process that a rank has put into a session of its own."""
    command = ["/bin/sh", "-c", "setsid sleep 62 & echo started; exec sleep 63"]

    async def scenario() -> None:
        async with pod(tmp_path, command, drain_grace_s=0.1) as (agent, coordinator):
            hello = await coordinator.wait(AgentHello)
            assert hello.metrics.startswith("http://127.0.0.1:")
            await agent.printed("started")
            below: dict[int, str] = {}

            def both() -> bool:
                below.update(descendants(agent.process.pid))
                return {"sleep 62", "sleep 63"} <= {text.strip() for text in below.values()}

            await until(both, "both sleep")
            agent.signal(signal.SIGTERM)
            await agent.ended()
            await gone(*below)

    asyncio.run(scenario())


def test_metrics_and_health_are_served(tmp_path: Path) -> None:
    script = RANK_SIDE + (
        "from paceline.telemetry.records import RankRecord\n"
        "record = RankRecord.open(settings.record_fd)\n"
        "rounds = record.counter('paceline_rounds_total', mode='Quorum', trigger='quorum')\n"
        "rounds.add(5)\n"
        "record.histogram('paceline_round_wait_seconds').observe(0.02)\n"
        "record.gauge('paceline_generation_number').set(3)\n"
        "print('written', settings.member, flush=True)\n"
        "line.read(); os._exit(7)\n"
    )

    async def scrape(url: str) -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200
            text = await response.text()
        return {
            sample.name + json.dumps(sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def find(page: dict[str, float], *parts: str) -> float:
        values = [v for k, v in page.items() if all(part in k for part in parts)]
        assert len(values) == 1, (parts, values)
        return values[0]

    async def scenario() -> None:
        async with pod(tmp_path, script) as (agent, coordinator):
            hello = await coordinator.wait(AgentHello)
            await agent.printed("written 2.0#1000")
            page = await scrape(hello.metrics)
            assert find(page, "rounds_total", '"quorum"', '"2.0"') == 5
            assert find(page, "round_wait_seconds_bucket", '"0.03"') == 1
            assert find(page, "round_wait_seconds_bucket", '"0.01"') == 0
            assert find(page, "generation_number") == 3
            assert 0 < find(page, "telemetry_seconds_total") < 0.1
            rank = await started(coordinator)
            os.kill(rank.pid, signal.SIGKILL)
            await agent.printed("written 2.0#1001")
            page = await scrape(hello.metrics)
            assert find(page, "rounds_total", '"quorum"', '"2.0"') == 10  # never decreases
            assert find(page, "round_wait_seconds_count") == 2
            assert find(page, "rank_restarts_total") == 1
            assert find(page, "rank_state_info", '"running"') == 1
            assert find(page, "coordinator_connected_info") == 1
            health = hello.metrics.replace("metrics", "healthz")
            async with aiohttp.ClientSession() as session, session.get(health) as response:
                assert await response.json() == {
                    "ranks": {"2.0#1001": "running"},
                    "coordinator": True,
                }

    asyncio.run(scenario())


def test_the_error_names_the_environment_variable_that_is_wrong() -> None:
    with pytest.raises(SettingsError, match="PACELINE_JOB is not set"):
        AgentSettings.from_environment({})
    env = {"PACELINE_JOB": "j", "PACELINE_SLOT": "-1"}
    with pytest.raises(SettingsError, match='PACELINE_SLOT is "-1": must not be negative'):
        AgentSettings.from_environment(env)
    assert RankSettings.from_environment({}) is None
