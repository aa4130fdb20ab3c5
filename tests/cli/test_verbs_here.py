"""The verbs for local runs: the conformance suite shared with clusters, and local behavior."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from paceline.jobs.interface import Until
from paceline.jobs.local import LocalJobs
from paceline.local import detached
from paceline_api.reading.load import parse_job

from testing.jobs import conformance
from testing.jobs.conformance import NAME, TIMEOUT
from testing.jobs.terminal import LIMIT_S, Terminal, until
from testing.processes.forked import detach_by
from testing.processes.forked_call import the_fork_server
from testing.processes.history import called, descendants
from tests.layers import exhaustive_unless

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Here(conformance.Place):
    """A user with one folder who has no other runs and no cluster."""

    start: ClassVar = ("run", "--detach")
    formed: ClassVar = "GenerationFormed"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        own = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": "", "HOME": str(folder)}
        env = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"} | own
        self.jobs = LocalJobs(env, folder)
        self.terminal = Terminal(folder, env)

    def manifest(self, **spec: Any) -> dict[str, Any]:
        manifest = super().manifest(**spec)
        manifest["spec"]["collective"]["backend"] = "gloo"
        return manifest

    def write(self, **spec: Any) -> None:
        (self.folder / "job.yaml").write_text(yaml.safe_dump(self.manifest(**spec)))

    def kill(self, rank: int) -> None:
        """Kill the process of a rank; on one machine a replica is lost only with its processes."""
        os.kill(self.terminal.status(NAME)["detail"]["ranks"][rank]["pid"], signal.SIGKILL)

    def left(self) -> object:
        return called("rank", descendants(the_fork_server().pid))

    def agents(self) -> dict[int, int]:
        """Return the pid of the agent of each active rank, by the rank's pid."""
        ranks = self.terminal.status(NAME)["detail"]["ranks"]
        pids = [rank["pid"] for rank in ranks if rank["state"] == "active"]
        return {pid: _parent_of(pid) for pid in pids}

    def show_logs(self) -> None:
        """Print the logs of the runs; pytest shows them if the test fails."""
        for log in sorted(self.folder.glob("runs/*/*.log")):
            sys.stdout.write(f"--- {log.name}\n{log.read_text()[-4000:]}\n")

    def close(self) -> None:
        self.show_logs()
        self.terminal.close()
        for note in self.folder.glob("runs/*/control.json"):
            os.kill(json.loads(note.read_text())["pid"], signal.SIGKILL)
        until(lambda: not self.left(), "without processes")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # runs inherit this environment
    monkeypatch.setattr(detached, "subprocess", detach_by(the_fork_server().name))
    made = Here(tmp_path)
    yield made
    made.close()


LONG = (
    conformance.the_whole_script,
    conformance.a_job_ends_by_itself,
    conformance.a_job_that_fails_says_why,
)
"""Checks that take more than 10 seconds each; other tests of `make test` cover their parts."""


@pytest.mark.parametrize(
    "check",
    exhaustive_unless(lambda check: check not in LONG, conformance.CHECKS),
    ids=lambda check: check.__name__,
)
def test_local_jobs_pass_the_conformance_suite(
    place: Here, check: Callable[[conformance.Place], None]
) -> None:
    check(place)


@pytest.mark.exhaustive
def test_a_suspended_run_resumes_from_its_checkpoint(place: Here) -> None:
    say = place.terminal
    place.write(checkpoint={"path": "saved", "everyRounds": 100_000})
    assert str(place.folder / "runs/verbs-1") in say.call("run", "job.yaml", "--detach")
    say.call("wait", NAME, "--for", "training", "--timeout", TIMEOUT)
    say.call("suspend", NAME)
    say.call("wait", NAME, "--for", "suspended", "--timeout", TIMEOUT)
    (kept,) = (place.folder / "saved").glob("v*")
    say.call("resume", NAME)
    say.call("wait", NAME, "--for", "training", "--timeout", TIMEOUT)
    assert int(say.status(NAME)["round"]) >= int(kept.name[1:])
    assert "ResumedFromCheckpoint" in say.call("events", NAME)
    say.call("delete", NAME)
    assert not (place.folder / "runs/verbs-1").exists()
    assert kept.exists(), "a checkpoint is the user's"


def test_verbs_read_an_ended_run_from_its_folder(place: Here) -> None:
    say = place.terminal
    place.write(backoffLimit=0)
    say.call("run", "job.yaml", "-d")
    waiting = say.start("wait", NAME)
    say.call("wait", NAME, "--for", "training")
    (place.folder / "mistake").touch()
    assert waiting.end() == 1
    assert waiting.lines[0].startswith("job verbs: Failed: BackoffLimitExceeded: ")
    assert "made on purpose" in say.call("status", NAME)
    log = (place.folder / "runs/verbs-1/run.log").read_text()
    assert "Exception in callback" not in log, "of the answer that somebody was waiting for"
    lines = say.call("logs", NAME, "--tail", "2").splitlines()
    assert {line.partition(" |")[0] for line in lines} >= {"rank 0", "rank 1"}
    only = say.call("logs", NAME, "--rank", "1").splitlines()
    assert only
    assert all(line.startswith("rank 1 |") for line in only)
    assert "use 0 to 1" in say.call("logs", NAME, "--rank", "2", code=2)
    assert "has ended" in say.call("suspend", NAME, code=2)
    say.call("delete", "runs/verbs-1")
    assert not (place.folder / "runs/verbs-1").exists()


@pytest.mark.exhaustive
def test_a_job_trains_again_after_its_agent_is_killed(place: Here) -> None:
    place.submit()
    place.jobs.wait(NAME, Until.TRAINING, timeout_s=LIMIT_S)
    until(lambda: len(place.agents()) == 2, "two active ranks")
    killed = max(place.agents().values())
    os.kill(killed, signal.SIGKILL)
    until(lambda: "its pod is gone" in place.terminal.call("events", NAME), "RankDied")
    until(lambda: len(place.agents()) == 2, "two active ranks again")
    assert killed not in place.agents().values()
    assert place.jobs.wait(NAME, Until.TRAINING, timeout_s=LIMIT_S).ready == 2


@pytest.mark.exhaustive
def test_paths_of_a_submitted_job_are_relative_to_its_folder(
    place: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The detached run is an executed program here, as it is for a user."""
    monkeypatch.setattr(detached, "subprocess", subprocess)
    code = place.folder / "code"
    code.mkdir()
    (code / "train.py").write_text("print('hello', flush=True)\nimport time; time.sleep(600)\n")
    job = place.jobs.submit(parse_job(yaml.safe_dump(place.manifest())), folder=code)
    assert (job.name, job.place) == (NAME, str(place.folder / "runs/verbs-1"))
    lines = place.jobs.logs(NAME, follow=True)
    assert next(line.rank for line in lines if line.text == "hello") in (0, 1)
    lines.close()
    place.jobs.delete(NAME, wait_s=LIMIT_S)


def test_a_detached_run_that_cannot_start_reports_the_reason(place: Here) -> None:
    place.write()
    output = place.terminal.call("run", "job.yaml", "--detach", "--run-dir", "job.yaml", code=2)
    assert output.startswith("error: run folder job.yaml: is a file")
    assert "hint: " in output
