"""`paceline status` and `paceline scale` from a process other than the runner."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.processes.forked_call import ForkedCall
from testing.processes.runs import forked_paceline

pytestmark = pytest.mark.processes

LIMIT_S = 240.0
JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: elastic}
spec:
  replicas: 2
  maxReplicas: 5
  minReplicas: 2
  collective: {backend: gloo, mode: Full}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, train.py]}]
"""
SCRIPT = """\
import time
import paceline as pl
import torch

torch.set_num_threads(1)
pl.init()
model = torch.nn.Linear(2, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
data = torch.utils.data.TensorDataset(torch.randn(4096, 2))
loader = pl.DataLoader(data, batch_size=4)
for _ in loader.epochs(1000):
    for (x,) in loader:
        time.sleep(0.1)
        model(x).square().mean().backward()
        optimizer.step()
"""


class Terminal:
    """Runs commands as the same user, in a folder of its own."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        # Hide other runs on the machine.
        own = {"XDG_RUNTIME_DIR": str(folder / "user"), "XDG_STATE_HOME": "", "HOME": str(folder)}
        self.env = own | env
        (folder / "user").mkdir(exist_ok=True)
        (folder / "job.yaml").write_text(JOB)
        (folder / "train.py").write_text(SCRIPT)
        self.runner: ForkedCall | None = None

    def run_job(self) -> None:
        self.runner = ForkedCall(["run", "job.yaml"], self.folder, os.environ | self.env)

    def call(self, *words: str) -> tuple[int, str]:
        code, output = forked_paceline(self.folder, *words, **self.env)
        assert "Traceback" not in output
        return code, output

    def status(self, *words: str) -> Any:
        code, output = self.call("status", *words, "-o", "json")
        return json.loads(output)["detail"] if code == 0 else None

    def until(self, name: str, want: Callable[[Any], bool]) -> Any:
        end = time.monotonic() + LIMIT_S
        while True:
            status = self.status(name)
            if status is not None and want(status):
                return status
            assert time.monotonic() < end, status
            time.sleep(0.5)

    def shown(self, *words: str) -> str:
        """Return the output for people; retry while the busy machine does not answer in time."""
        end = time.monotonic() + LIMIT_S
        while (done := self.call("status", *words))[0] != 0:
            assert "does not answer" in done[1], done
            assert time.monotonic() < end, done
        return done[1]

    def end(self) -> tuple[int, str]:
        assert self.runner is not None
        self.runner.send_signal(signal.SIGINT)
        output, _ = self.runner.communicate(timeout=LIMIT_S)
        self.runner.close()
        return self.runner.wait(), output


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    if made.runner is not None:
        made.runner.close()


def active(count: int) -> Callable[[Any], bool]:
    def holds(status: Any) -> bool:
        return bool(count == sum(rank["state"] == "active" for rank in status["ranks"]))

    return holds


def _carriers(status: dict[str, Any]) -> list[str]:
    return [rank["carrier"] for rank in status["ranks"] if rank["state"] == "active"]


def test_scaling_up_and_down_from_another_terminal_works(terminal: Terminal) -> None:
    terminal.run_job()
    terminal.until("elastic", active(2))

    grown = terminal.call("scale", "elastic", "--replicas", "4")
    here = f"this machine in {terminal.folder / 'runs/elastic-1'}"
    assert grown == (0, f"job elastic of {here}: 2 -> 4 replicas\n")
    status = terminal.until("elastic", active(4))
    assert status["replicas"] == 4
    pids = {rank["pid"] for rank in status["ranks"]}

    shown = terminal.shown()
    assert "mode Full" in shown
    assert "active 4/4" in shown
    assert f"logs in {terminal.folder}/runs/elastic-1" in shown
    assert all(str(pid) in shown for pid in pids)

    back = terminal.call("scale", "runs/elastic-1", "--replicas", "2")
    assert back == (0, f"job runs/elastic-1 of {here}: 4 -> 2 replicas\n")

    def two_have_left(status: Any) -> bool:
        gone = [rank for rank in status["ranks"] if rank["state"] == "dead"]
        return active(2)(status) and [rank["why"] for rank in gone] == ["drained", "drained"]

    status = terminal.until("elastic", two_have_left)
    assert {rank["pid"] for rank in status["ranks"]} == pids, "nobody was started again"
    assert not any(status["log"]["samples_dropped"].values())

    for replicas, text in (("1", "spec.minReplicas = 2"), ("6", "spec.maxReplicas = 5")):
        code, output = terminal.call("scale", "elastic", "--replicas", replicas)
        assert code == 2
        assert text in output
        assert "hint: use" in output

    code, output = terminal.end()
    assert code == 130, output
    assert list((terminal.folder / "user" / "paceline").iterdir()) == []
    assert not (terminal.folder / "runs/elastic-1/control.json").exists()
    code, output = terminal.call("status", "runs/elastic-1")
    assert code == 0
    assert output.startswith("job elastic: ")
    code, output = terminal.call("scale", "runs/elastic-1", "--replicas", "3")
    assert code == 2
    assert "has ended" in output


def test_a_killed_runner_is_detected(terminal: Terminal) -> None:
    terminal.run_job()
    terminal.until("runs/elastic-1", active(2))
    folder = terminal.folder / "user" / "paceline"
    [note] = folder.iterdir()
    for path in (note, terminal.folder / "runs/elastic-1/control.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert terminal.runner is not None
    terminal.runner.kill()
    terminal.runner.communicate(timeout=LIMIT_S)
    code, output = terminal.call("status")
    assert code == 1
    assert "no job is running" in output
    assert not note.exists()
    code, output = terminal.call("scale", "elastic", "--replicas", "3")
    assert code == 2
    assert "has ended" in output
    assert "was killed" in terminal.call("status", "elastic")[1]


@pytest.mark.exhaustive
def test_status_reports_a_stopped_runner_the_transport_and_the_end_of_a_watch(
    terminal: Terminal,
) -> None:
    """A stopped runner, the detected transport, and the end of the job while watching.

    The agents of real processes detect the transport; loopback is not RDMA on any machine.
    """
    script = SCRIPT.replace("Linear(2, 1)", "Linear(2, 60_000)")
    (terminal.folder / "train.py").write_text(script)
    terminal.run_job()
    terminal.until("elastic", active(2))
    assert terminal.runner is not None
    terminal.runner.send_signal(signal.SIGSTOP)
    code, output = terminal.call("status", "elastic")
    terminal.runner.send_signal(signal.SIGCONT)
    assert code == 1
    assert f"process {terminal.runner.pid}, does not answer within 5 s" in output
    # The transport is unknown in the first rounds; each agent detects it by itself.
    status = terminal.until("elastic", lambda s: active(2)(s) and all(_carriers(s)))
    assert _carriers(status) == ["TCP", "TCP"]
    assert status["carrier"] == "TCP"
    assert "gloo over TCP" in terminal.shown("elastic")
    assert "the only candidate" in terminal.shown("elastic", "-o", "wide")
    watch = ForkedCall(["status", "--watch"], terminal.folder, os.environ | terminal.env)
    lines = watch.lines()
    first, second = next(lines), next(lines)
    terminal.end()
    assert watch.wait(LIMIT_S) == 0
    watch.close()
    assert "mode Full" in first
    assert first != second


def test_status_finds_a_job_by_its_run_folder_without_a_runtime_dir(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    terminal = Terminal(
        tmp_path, XDG_RUNTIME_DIR=str(tmp_path / "file"), HOME="", XDG_STATE_HOME=""
    )
    terminal.run_job()
    try:
        terminal.until("runs/elastic-1", active(2))
        assert terminal.call("status")[0] == 1, "no note tells of it"
        assert terminal.call("status", "elastic")[0] == 0, "it is the latest in runs/"
    finally:
        code, output = terminal.end()
    assert code == 130
    assert "`paceline status` needs the folder" in output
