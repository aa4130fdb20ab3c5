"""`paceline run` with scripts that fail before any training.

In each case the exit code is set, the error names rank and reason, and no process is left.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
from paceline.agent.launch import ENV_COMPILED

from testing.processes.runs import LIMIT_S, ForkedRun, Run

pytestmark = pytest.mark.processes


def test_a_script_that_raises_is_reported_without_frames_of_paceline(tmp_path: Path) -> None:
    code, output = ForkedRun(tmp_path, "[python, -c, 'raise ValueError(12345)']").wait()
    assert code == 1
    assert "error: rank " in output
    assert "ValueError: 12345" in output
    assert "paceline/" not in output, "a traceback of Paceline's own"


def test_a_script_without_paceline_is_reported_and_its_output_is_kept(tmp_path: Path) -> None:
    code, output = ForkedRun(tmp_path, "[python, -c, 'print(4711)']").wait()
    assert code == 1
    assert "] 4711" in output, "what a rank prints is shown"
    assert "ScriptTookNoPart" in output
    assert "never called pl.init(), so each rank" in output
    files = [path for path in tmp_path.glob("runs/**/*") if path.is_file()]
    holders = [path.name for path in files if b"4711\n" in path.read_bytes()]
    assert "printed.log" in holders, "what a rank prints is kept with its time, among the others'"
    holders.remove("printed.log")
    assert holders
    assert all(name.startswith("rank-") for name in holders), "and once in a file of its own"
    assert "Traceback" not in output


def test_a_script_that_ends_before_its_loop_is_reported_as_ended_early(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import paceline\npaceline.init()\n")
    code, output = ForkedRun(tmp_path, "[python, train.py]").wait()
    assert code == 1
    assert "ScriptEndedEarly" in output
    assert "Traceback" not in output


def test_ctrl_c_while_the_ranks_are_starting_ends_the_run(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, "[sleep, '1000']")
    run.until("with pid")
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 130
    assert "ended by the user" in output
    assert "Traceback" not in output


def test_a_run_ends_when_its_active_deadline_expires(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, "[sleep, '1000']", "--set", "spec.activeDeadlineSeconds=1")
    code, output = run.wait()
    assert code == 1
    assert "DeadlineExceeded" in output
    assert "the job ran for 1s" in output
    assert "spec.activeDeadlineSeconds" in output


IGNORABLE = (signal.SIGHUP, signal.SIGINT)


@pytest.mark.exhaustive
def test_processes_of_a_run_keep_ignoring_signals_that_its_parent_ignores(tmp_path: Path) -> None:
    """A closed terminal must not end the runner, the coordinator or an agent."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORABLE}
    try:
        run = Run(tmp_path, "[sleep, '1000']")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    run.until("with pid")
    for number in IGNORABLE:
        run.process.send_signal(number)
    handled = {
        pid: [number for number in IGNORABLE if not _ignores(pid, number)]
        for pid in (run.process.pid, *_with_module(run, "coordinator"), *_with_module(run, "agent"))
    }
    assert len(handled) == 4
    assert not any(handled.values()), handled
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 130


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_two_jobs_can_run_at_once_in_one_folder(tmp_path: Path) -> None:
    runs = [ForkedRun(tmp_path, "[sleep, '1000']", name=name) for name in ("one", "two")]
    for run, folder in zip(runs, ("one-1", "two-1"), strict=True):
        run.until("with pid", folder)
    folders = {path.name for path in (tmp_path / "runs").iterdir()}
    assert folders == {"one-1", "two-1"}
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
        assert run.wait()[0] == 130


def test_a_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    first = ForkedRun(tmp_path, "[sleep, '1000']", "--run-dir", "runs/mine")
    first.until("with pid")
    second = ForkedRun(tmp_path, "[sleep, '1000']", "--run-dir", "runs/mine", name="other")
    code, output = second.wait()
    assert code == 2
    assert "belongs to another run" in output
    first.process.send_signal(signal.SIGINT)
    assert first.wait()[0] == 130


def test_all_processes_end_after_the_runner_is_killed(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, "[sleep, '1000']", "--set", "spec.elasticity.drainGraceSeconds=1")
    run.until("with pid")
    run.process.kill()
    run.until_gone()


def _environment(tmpdir: str, folder: Path) -> dict[str, str]:
    """Return an environment with a temporary folder in which no compiled code outlives a run."""
    return {**os.environ, "TMPDIR": tmpdir, ENV_COMPILED: str(folder / "compiled")}


def test_the_last_agent_removes_the_temporary_files_of_a_killed_runner(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as tmpdir:
        env = _environment(tmpdir, tmp_path)
        with ForkedRun(tmp_path, "[sleep, '1000']", env=env) as run:
            run.until("with pid")
            assert list(Path(tmpdir).glob("*/control"))
            run.process.kill()
            run.until_gone()
        assert list(Path(tmpdir).iterdir()) == []


@pytest.mark.exhaustive
def test_the_next_run_removes_the_temporary_files_of_a_killed_run(tmp_path: Path) -> None:
    """Runner and agents are killed, so no process of the run is left to clean up."""
    sleep = "[sleep, '1000']"
    with tempfile.TemporaryDirectory(prefix="t-") as tmpdir:
        env = _environment(tmpdir, tmp_path)
        with (
            ForkedRun(tmp_path, sleep, name="a", env=env) as living,
            ForkedRun(tmp_path, sleep, name="b", env=env) as killed,
        ):
            for run, folder in ((living, "a-1"), (killed, "b-1")):
                run.until("with pid", folder)
            [before] = [path for path in Path(tmpdir).glob("*/control") if _is_of(path, killed)]
            folders = set(Path(tmpdir).iterdir())
            agents = _agents_of(tmp_path / "runs/b-1", replicas=2)
            for agent in agents:
                os.kill(agent, signal.SIGSTOP)  # prevent an orderly end
            killed.process.kill()
            killed.process.wait(LIMIT_S)
            for agent in agents:
                os.kill(agent, signal.SIGKILL)
            killed.until_gone()
            assert before.exists()
            failing = "[python, -c, 'raise ValueError']"
            code, _ = ForkedRun(tmp_path, failing, name="c", env=env).wait()
            assert code == 1
            assert set(Path(tmpdir).iterdir()) == folders - {before.parent}
            living.process.send_signal(signal.SIGINT)
            assert living.wait()[0] == 130
        assert list(Path(tmpdir).iterdir()) == []


def _is_of(control: Path, run: ForkedRun) -> bool:
    return f"pid {run.process.pid}," in control.with_name("owner").read_text()


def _agents_of(folder: Path, *, replicas: int) -> list[int]:
    """Wait until all ranks have started, and return the pids of their parents."""
    end = time.monotonic() + LIMIT_S
    while True:
        logs = "".join(log.read_text() for log in folder.glob("agent-*.log"))
        ranks = re.findall(r"started with pid (\d+)", logs)
        if len(ranks) == replicas:
            break
        assert time.monotonic() < end, logs
        time.sleep(0.05)
    status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in ranks)
    return [int(pid) for pid in re.findall(r"^PPid:\s+(\d+)$", status, re.MULTILINE)]


def _with_module(run: Run, name: str) -> list[int]:
    pids = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                marked = run.mark.encode() in (process / "environ").read_bytes()
                if marked and f"paceline.{name}".encode() in (process / "cmdline").read_bytes():
                    pids.append(int(process.name))
            except OSError:
                continue
    return pids
