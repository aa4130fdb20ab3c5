"""From nothing to nothing on this machine with the command line alone: the script of
tests/nodes/test_verbs.py for a run without a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.runs import PACELINE, processes_with
from paceline.jobs.errors import NameTakenError, WaitTimeoutError
from paceline.jobs.interface import Until
from paceline.jobs.local import LocalJobs
from paceline_api.reading.load import parse_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

LIMIT_S = 240.0
JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: verbs}
spec:
  replicas: 2
  maxReplicas: 4
  collective: {backend: gloo, mode: Full}
  checkpoint: {path: saved, everyRounds: 100000}
  template:
    spec:
      containers:
      - name: trainer
        image: none
        command: [python, train.py]
        env: [{name: MARK, value: "MARKED"}]
"""
SCRIPT = """\
import os
import time
import paceline as pl
import torch

torch.set_num_threads(1)
pl.init()
model = torch.nn.Linear(2, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = pl.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 2)), batch_size=4)
steps = 0
for epoch in loader.epochs(1000):
    for (x,) in loader:
        time.sleep(0.02)
        model(x).square().mean().backward()
        optimizer.step()
        steps += 1
        if steps % 10 == 0:
            print(f"step {steps}", flush=True)
        if os.path.exists("enough"):
            raise SystemExit(0)
"""


class Terminal:
    """Calls the program as one user in one folder, who sees no other runs and no cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"paceline-test-{os.getpid()}-{folder.name}"
        own = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": "", "HOME": str(folder)}
        self.env = os.environ | own
        self.env.pop("KUBECONFIG", None)
        (folder / "job.yaml").write_text(JOB.replace("MARKED", self.mark))
        (folder / "train.py").write_text(SCRIPT)

    def call(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [PACELINE, *words], cwd=self.folder, env=self.env, text=True, timeout=LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == code, (words, done)
        assert "Traceback" not in done.stdout
        return done.stdout

    def status(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.call("status", "verbs", "-o", "json"))
        return found


class Followed:
    """`paceline logs -f`, read while it runs."""

    def __init__(self, terminal: Terminal) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [PACELINE, "logs", "verbs", "-f", "--timestamps"],
            cwd=terminal.folder, env=terminal.env, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            self.lines.extend(line.rstrip("\n") for line in said)

    def of(self, rank: int) -> list[str]:
        return [line for line in list(self.lines) if f"rank {rank} |" in line]

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._thread.join(LIMIT_S)
        return code


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, f"not {what}"
        time.sleep(0.1)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    for note in tmp_path.glob("runs/*/control.json"):
        os.kill(json.loads(note.read_text())["pid"], signal.SIGKILL)
    until(lambda: not processes_with(made.mark), "without processes")


def test_from_nothing_to_nothing(terminal: Terminal) -> None:
    said = terminal.call("run", "job.yaml", "--detach")
    folder = terminal.folder / "runs/verbs-1"
    assert str(folder) in said
    assert "Training" in terminal.call("wait", "verbs", "--for", "training", "--timeout", "3m")

    followed = Followed(terminal)
    until(lambda: followed.of(0) and followed.of(1), "lines of both ranks")
    detail = terminal.status()["detail"]
    assert isinstance(detail, dict)
    victim = detail["ranks"][1]["pid"]
    os.kill(victim, signal.SIGKILL)
    before = len(followed.of(1))
    until(lambda: len(followed.of(1)) > before + 3, "the rank that was started again is heard")

    assert "2 -> 3 replicas" in terminal.call("scale", "verbs", "--replicas", "3")
    terminal.call("wait", "verbs", "--for", "training", "--timeout", "3m")
    until(lambda: followed.of(2), "the new rank is heard")

    assert "of this machine" in terminal.call("suspend", "verbs")
    assert "Suspended" in terminal.call("wait", "verbs", "--for", "suspended", "--timeout", "3m")
    assert "resume" in terminal.call("explain", "verbs")
    (kept,) = (terminal.folder / "saved").glob("v*")
    assert len(processes_with(terminal.mark)) == 0, "a suspended job has no processes"
    assert "Suspended" in terminal.call("wait", "verbs", "--timeout", "1s", code=3)

    assert "of this machine" in terminal.call("resume", "verbs")
    terminal.call("wait", "verbs", "--for", "training", "--timeout", "3m")
    status = terminal.status()
    assert int(str(status["round"])) >= int(kept.name[1:]), "it went on from the checkpoint"
    assert (status["ready"], status["replicas"]) == (3, 3)

    assert "ResumedFromCheckpoint" in terminal.call("events", "verbs")
    assert "nothing holds it up" in terminal.call("explain", "verbs")
    times = [line.partition(" ")[0] for line in followed.lines]
    assert times == sorted(times), "in order of time"

    assert "of this machine is deleted" in terminal.call("delete", "verbs")
    assert followed.end() == 0
    assert not folder.exists()
    assert processes_with(terminal.mark) == []
    assert "no job verbs is running here" in terminal.call("status", "verbs", code=2)


def test_the_end_of_a_run_without_a_terminal_is_waited_for(terminal: Terminal) -> None:
    terminal.call("run", "job.yaml", "-d", "--set", "spec.checkpoint=null")
    waiting = subprocess.Popen(
        [PACELINE, "wait", "verbs"], cwd=terminal.folder, env=terminal.env, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    terminal.call("wait", "verbs", "--for", "training")
    (terminal.folder / "enough").touch()
    said, _ = waiting.communicate(timeout=LIMIT_S)
    assert waiting.returncode == 1
    assert said.startswith("job verbs: Failed: RankFailed: ")
    assert "ScriptEndedEarly" in said
    assert "ScriptEndedEarly" in terminal.call("status", "verbs")
    assert "It has failed" in terminal.call("explain", "verbs")
    lines = terminal.call("logs", "verbs", "--tail", "2").splitlines()
    assert {line.partition(" |")[0] for line in lines} >= {"rank 0", "rank 1"}
    only = terminal.call("logs", "verbs", "--rank", "1").splitlines()
    assert only
    assert all(line.startswith("rank 1 |") for line in only)
    assert "use 0 to 1" in terminal.call("logs", "verbs", "--rank", "2", code=2)
    assert "has ended" in terminal.call("suspend", "verbs", code=2)
    terminal.call("delete", "runs/verbs-1")
    assert not (terminal.folder / "runs/verbs-1").exists()


def test_a_job_is_submitted_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the interface that the SDK uses: from data, with paths that begin at a folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "wait.py").write_text(
        "import time\nfor n in range(3): print('hello', n, flush=True)\ntime.sleep(600)\n"
    )
    jobs = LocalJobs({"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path)
    try:
        job = parse_job(JOB.replace("train.py", "wait.py").replace("MARKED", "none"))
        found = jobs.submit(job, folder=tmp_path / "code")
        assert (found.name, found.place) == ("verbs", str(tmp_path / "runs/verbs-1"))
        with pytest.raises(NameTakenError):
            jobs.submit(job, folder=tmp_path)
        lines = jobs.logs("verbs", follow=True)
        said = [next(lines) for _ in range(6)]
        lines.close()
        assert sorted((line.rank, line.text) for line in said if line.rank is not None)[:2] == [
            (0, "hello 0"), (0, "hello 1"),
        ]  # fmt: skip
        with pytest.raises(WaitTimeoutError):
            jobs.wait("verbs", Until.TRAINING, timeout_s=0.5)
        assert [one.name for one in jobs.all()] == ["verbs"]
    finally:
        jobs.delete("verbs", wait_s=LIMIT_S)
    assert jobs.all() == []
    assert not (tmp_path / "runs/verbs-1").exists()


def test_a_run_that_cannot_begin_says_why(terminal: Terminal) -> None:
    said = terminal.call("run", "job.yaml", "--detach", "--run-dir", "job.yaml", code=2)
    assert said.startswith("error: run folder job.yaml: is a file")
    assert "hint: " in said
