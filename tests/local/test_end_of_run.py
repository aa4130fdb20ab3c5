"""A run ends soon after its last round, whatever some processes are still doing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGSTOP

import pytest

from testing.processes.history import ForkServer, History, check
from testing.processes.runs import ForkedRun
from tests.layers import exhaustive_except
from tests.local.stuck_script import LOOP, READ, stuck_script

pytestmark = pytest.mark.processes


def test_a_rank_that_is_still_importing_does_not_delay_the_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(stuck_script(before="RANK == 2"))
    options = ["--replicas", "3", "--set", "spec.elasticity.settleSeconds=1"]
    run = ForkedRun(tmp_path, "[python, train.py]", *options, "--run-dir", "run")
    code, output = run.wait()
    assert code == 0, output
    assert "still importing" in output
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["outcome"]["complete"]
    # Otherwise the agent would have given it 10 s to exit by itself.
    log = (tmp_path / "run" / "agent-2-0.log").read_text()
    assert "killing rank 2.0#0: all ranks are released" in log
    assert "did not leave in time" not in log
    assert not [h for h in status["happenings"] if h["reason"] == "RankDied"]


FOREVER = {
    "loop": LOOP,
    "read": READ,
    "deaf": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)",
}


@pytest.mark.parametrize("how", exhaustive_except(["deaf"], FOREVER))
def test_a_script_that_does_not_return_is_ended_and_the_job_completes(
    tmp_path: Path, how: str
) -> None:
    """Hang after training.

    The run used to wait forever, and printed nothing after "Released".
    """
    (tmp_path / "train.py").write_text(stuck_script(FOREVER[how], behind="RANK == 1"))
    options = ["--set", "spec.finishDeadlineSeconds=4", "--run-dir", "run"]
    code, output = ForkedRun(tmp_path, "[python, train.py]", *options).wait()
    assert code == 0, output
    assert "job job: Complete" in output
    [named] = [line for line in output.splitlines() if "ScriptStillRuns: " in line]
    assert "rank 1.0#0 on " in named
    assert "rank 0.0#0" not in named
    assert "ScriptCutShort: rank 1.0#0: its script was cut short" in output
    assert "still running 4 s after the job was complete" in output


@pytest.mark.exhaustive
def test_the_deadline_of_a_script_holds_when_the_run_is_killed(tmp_path: Path) -> None:
    """Kill the run while a script is stuck.

    Agent, launcher and rank used to stay forever, one of them using a core.
    """
    (tmp_path / "train.py").write_text(stuck_script(LOOP, behind="RANK == 1"))
    run = ForkedRun(tmp_path, "[python, train.py]", "--set", "spec.finishDeadlineSeconds=6")
    try:
        run.until("stuck behind the loop")
        run.process.kill()
        run.process.wait(10)
        end = time.monotonic() + 60
        while left := run.process.left_over():
            assert time.monotonic() < end, left
    finally:
        run.process.close()


ENDLESS = """
import time
import torch
import paceline as pl

pl.init()
model = torch.nn.Linear(4, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
begun, told = time.monotonic(), False
for step in pl.steps(10**9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if not told and time.monotonic() - begun > 3:
        told = True
        print("has trained for a while", flush=True)
"""


@pytest.mark.exhaustive
def test_a_terminal_that_closes_leaves_a_checkpoint(tmp_path: Path) -> None:
    """Send SIGHUP, which is handled like SIGTERM; a second one does not cut the drain short."""
    (tmp_path / "train.py").write_text(ENDLESS)
    keep = "spec.checkpoint={path: kept, everyRounds: 1000000}"
    run = ForkedRun(tmp_path, "[python, train.py]", "--set", keep)
    run.until("has trained for a while")
    run.process.send_signal(SIGHUP)
    run.process.send_signal(SIGHUP)
    code, output = run.wait()
    assert code == 130, output
    assert "stopping after the next round" in output
    assert list((tmp_path / "kept").rglob("*.safetensors")), output


def test_deaths_after_the_release_start_no_replacements(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Kill an agent while the coordinator, which knows of the release, is restarted.

    A replacement would be killed too.
    """
    history = History(
        *("gloo", 2, "Deadline", "at the end", 1),
        at_the_end=(
            ("coordinator", 0, 0, 300),
            ("agent", 1, SIGKILL, 0),
            ("agent", 1, SIGKILL, 3000),
        ),
        linger_ms=6000,
        collective={"deadline": "auto"},
        rounds=20,
    )
    check(history, fork_server.run(history, tmp_path / "run"))


@pytest.mark.exhaustive
def test_a_run_does_not_wait_for_an_agent_stopped_at_the_end(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Stop an agent, so that nobody reaps its rank; the run used to wait for ten minutes."""
    history = History(
        *("gloo", 2, "Full", "at the end", 1),
        at_the_end=(("agent", 1, SIGSTOP, 0),),
        linger_ms=3000,
        collective={"freezeTimeout": "5s"},
        rounds=20,
    )
    result = fork_server.run(history, tmp_path / "run")
    assert result["complete"], result
    assert any("AgentSilent: the agent of replica 1" in line for line in result["said"])
    assert result["left_over"], "what the agent has not reaped"
    check(history, result | {"left_over": 0})


SAVES = """
import time
import torch
import paceline as pl

pl.init()
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = pl.DataLoader(data, batch_size=8, seed=0)
for epoch in loader.epochs(1):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
time.sleep(1)
print("saving", flush=True)
time.sleep(HOW_LONG)
print("saved", flush=True)
"""


def until_taken(pid: int, number: int) -> None:
    """Wait until a process has taken a signal, because two pending signals count as one."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        status = Path(f"/proc/{pid}/status").read_text()
        pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
        if not pending >> (number - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError(f"signal {number} was not taken")


@pytest.mark.parametrize(("interrupts", "seconds"), [(1, 1), (2, 600)])
def test_an_interrupt_leaves_a_complete_job_complete(
    tmp_path: Path, interrupts: int, seconds: int
) -> None:
    """Interrupt once, which lets the scripts end, or twice, which ends them.

    Neither changes the outcome of the job, and its status shows nothing in progress afterwards.
    """
    (tmp_path / "train.py").write_text(SAVES.replace("HOW_LONG", str(seconds)))
    run = ForkedRun(tmp_path, "[python, train.py]", "--quiet", "--run-dir", "runs/one")
    run.until("saving")
    for _ in range(interrupts):
        run.process.send_signal(SIGINT)
        until_taken(run.process.pid, SIGINT)
    code, output = run.wait()
    assert "job job: Complete" in output
    assert code == 0
    assert ("] saved" in output) is (interrupts == 1)
    status = json.loads((tmp_path / "runs" / "one" / "status.json").read_text())
    assert status["outcome"]["complete"]
    assert status["conditions"] == []
    if interrupts == 1:
        assert {rank["state"] for rank in status["ranks"]} == {"finished"}
