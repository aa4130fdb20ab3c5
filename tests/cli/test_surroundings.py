"""Runs in a difficult environment: full or read-only disks, foreign variables, used ports.

Where a run cannot work, it reports so before anything is started. Where it can, training ends as
usual.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace
from paceline_api.jobfile import JobFile
from paceline_api.reading.load import parse_job
from paceline_api.resolve import resolve

from testing.agent_harness import JOB
from testing.processes.forked_call import ForkedCall
from testing.processes.runs import LIMIT_S, ForkedRun, Run, end_of, may_mount

pytestmark = pytest.mark.processes
needs_mount = pytest.mark.skipif(not may_mount(), reason="no right to mount a small disk")

TRAIN = """\
import sys, torch
import paceline as pl
torch.set_num_threads(1)
pl.init()
model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = pl.DistributedOptimizer(sgd, model)
data = torch.utils.data.TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1))
loader = pl.DataLoader(data, batch_size=4)
for epoch in loader.epochs(3):
    for x, y in loader:
        print("chatter " * (2000 if "chatty" in sys.argv else 1), flush=True)
        (model(x) - y).square().mean().backward()
        optimizer.step()
print("done", flush=True)
"""
COMMAND = "[python, train.py]"
DISK = "mkdir -p small; mount -t tmpfs -o size=128k,mode=700 none small"
FILL = "dd if=/dev/zero of=small/rest bs=4k 2>/dev/null || true"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def completes(run: Run | ForkedRun) -> str:
    code, output = run.wait()
    assert code == 0, output
    assert output.count("] done") == 2, output
    assert "Traceback" not in output
    return output


def refused(run: ForkedRun, *parts: str) -> None:
    code, output = run.wait()
    assert code == 2, output
    assert output.startswith("error: run folder ")
    assert "\nhint: " in output
    for part in parts:
        assert part in output, output
    assert "Traceback" not in output


@needs_mount
@pytest.mark.parametrize("folder", ["small/mine", "default"])
def test_a_full_disk_is_reported_before_anything_starts(job: Path, folder: str) -> None:
    words = ["--run-dir", folder] if folder != "default" else []
    before = f"{DISK}; ln -s small runs; {FILL}"
    run = ForkedRun(job, COMMAND, "--quiet", *words, before=before)
    refused(run, "no space left on device", "free some space", "--run-dir")


@needs_mount
def test_a_read_only_disk_is_reported(job: Path) -> None:
    before = f"{DISK}; mount -o remount,ro small"
    run = ForkedRun(job, COMMAND, "--quiet", "--run-dir", "small/mine", before=before)
    refused(run, "read-only file system", "--run-dir")


@needs_mount
def test_a_job_completes_although_the_disk_of_its_logs_fills_up(job: Path) -> None:
    """The job also completes although its rounds can no longer be recorded."""
    words = ["--quiet", "--run-dir", "small/mine", "--record"]
    output = completes(ForkedRun(job, "[python, train.py, chatty]", *words, before=DISK))
    assert "no space left on device" in output.lower()


def test_loader_workers_work_below_a_long_tmpdir(job: Path) -> None:
    """Sockets of workers must not exceed the limit on AF_UNIX paths.

    Each batch used to fail in its worker with "AF_UNIX path too long", and the script waited
    forever.
    """
    script = TRAIN.replace("batch_size=4", "batch_size=4, num_workers=1")
    (job / "train.py").write_text(script)
    long = job / ("x" * 40)
    long.mkdir()
    words = ("--quiet", "--set=spec.stepDeadlineSeconds=20")
    code, output = ForkedRun(job, COMMAND, *words, env=os.environ | {"TMPDIR": str(long)}).wait()
    assert code == 0, output
    assert output.count("] done") == 2, output


SMALL_SHM = "mount -t tmpfs -o size=1m none /dev/shm"


@needs_mount
def test_shared_memory_too_small_for_mpi_is_reported_before_anything_starts(job: Path) -> None:
    """Without the check, seven ranks died of SIGBUS one after the other."""
    words = ("--quiet", "--set=spec.collective.backend=mpi")
    code, output = ForkedRun(job, COMMAND, *words, before=SMALL_SHM).wait()
    assert code == 2, output
    assert output.startswith(
        "error: MPI takes 2.0 MiB of shared memory for 2 ranks, and /dev/shm has"
    )
    assert "\nhint: enlarge it (docker run --shm-size" in output
    assert not (job / "runs").exists()


LARGE_BATCHES = TRAIN.replace("batch_size=4", "batch_size=4, num_workers=1").replace(
    "TensorDataset(torch.zeros(64, 4),", "TensorDataset(torch.zeros(64, 1 << 18)[:, :],"
)


@needs_mount
def test_shared_memory_too_small_for_the_loader_is_reported(job: Path) -> None:
    """The need of loader workers depends on the data, so it cannot be checked in advance."""
    (job / "train.py").write_text(LARGE_BATCHES.replace("model(x)", "model(x[:, :4])"))
    code, output = ForkedRun(job, COMMAND, "--quiet", before=SMALL_SHM).wait()
    assert code == 1, output
    error = next(line for line in reversed(output.splitlines()) if line.startswith("error: "))
    assert "shared memory" in error or "/dev/shm" in error, output


@pytest.mark.exhaustive
def test_two_jobs_complete_with_foreign_variables_and_a_port_in_use(job: Path) -> None:
    """Two jobs of one name run in one folder, over MPI and gloo, with their metrics port in use.

    The environment holds variables of torchrun, mpiexec and another job of Paceline; PATH and HOME
    are missing.
    """
    torchrun = {"RANK": "7", "WORLD_SIZE": "many", "LOCAL_RANK": "-1", "MASTER_PORT": "x"}
    mpiexec = {"PMI_RANK": "3", "PMI_SIZE": "0", "PMI_FD": "99"}
    other = {"PACELINE_MEMBER": "me", "PACELINE_COORDINATOR": "ftp://x", "PACELINE_PROCS": "0"}
    terminal = {"LANG": "C", "LC_ALL": "C", "COLUMNS": "wide", "TERM": ""}
    env = {**torchrun, **mpiexec, **other, **terminal, "XDG_RUNTIME_DIR": "/none"}
    env["TMPDIR"] = tempfile.gettempdir()  # torch.compile's cache in it is kept
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = ["--set", f"spec.metrics.port={used.getsockname()[1]}"]
        sets = [[*port, "--set", f"spec.collective.backend={kind}"] for kind in ("mpi", "gloo")]
        runs = [Run(job, COMMAND, "--quiet", *words, env=env) for words in sets]
        for run in runs:
            run.process.wait(LIMIT_S)
        for run in runs:
            completes(run)
    assert {path.name for path in (job / "runs").iterdir()} == {"job-1", "job-2"}


def test_a_metrics_port_in_use_in_a_pod_is_reported(tmp_path: Path) -> None:
    """Choosing another port would be useless in a pod: no scraper would find it."""
    spec = tmp_path / "spec.json"
    resolved = resolve(parse_job(JOB))
    spec.write_text(
        replace(JobFile.of(resolved, command=["sleep", "60"]), backend="gloo").to_json()
    )
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        env = {
            "PATH": os.environ["PATH"],
            "PACELINE_JOB": "job",
            "PACELINE_SLOT": "0",
            "PACELINE_ATTEMPT": "0",
            "PACELINE_PROCS": "1",
            "PACELINE_COORDINATOR": "http://127.0.0.1:1",
            "PACELINE_TOKEN": "secret",
            "PACELINE_RUN_DIR": str(tmp_path),
            "PACELINE_SPEC": str(spec),
            "PACELINE_HOST": "127.0.0.1",
            "PACELINE_METRICS_PORT": str(port),
        }
        argv = [sys.executable, "-m", "paceline.agent"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert f"error: spec.metrics.port: {port} cannot be used: address already in use" in done.stderr
    assert "hint: choose another port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("PACELINE_MEMBER", "first", ["PACELINE_MEMBER", "first"]),
        ("PACELINE_HOST", "", ["PACELINE_HOST", "is not set"]),
        ("PACELINE_TOKEN", "", ["PACELINE_TOKEN", "is not set"]),
    ],
)
def test_a_rank_reports_which_environment_variable_is_invalid(
    tmp_path: Path, name: str, value: str, parts: list[str]
) -> None:
    env = os.environ | {
        "PACELINE_JOB": "job",
        "PACELINE_MEMBER": "0.0#0",
        "PACELINE_TOKEN": "secret",
        "PACELINE_RUN_DIR": str(tmp_path),
        "PACELINE_SPEC": str(tmp_path / "none.json"),
        "PACELINE_LOCAL": "1",
        name: value,
    }
    (tmp_path / "train.py").write_text("import paceline\npaceline.init()\n")
    code, output = end_of(ForkedCall(["train.py"], tmp_path, env, "python"))
    assert code != 0
    for part in (*parts, "hint: "):
        assert part in output, output
    assert "runtime/paceline/" not in output


def test_the_run_folder_of_a_killed_run_is_kept_and_not_reused(job: Path) -> None:
    """The folder is kept for diagnosis, and the next run gets a new one."""
    first = ForkedRun(job, "[sleep, '1000']", "--set", "spec.elasticity.drainGraceSeconds=1")
    first.until("with pid")
    first.process.kill()
    first.until_gone()
    refused(ForkedRun(job, COMMAND, "--run-dir", "runs/job-1"), "job-1", "can be removed")
    code, output = ForkedRun(job, "['false']", "--quiet").wait()
    assert code == 1
    assert str(job / "runs" / "job-2") in output
