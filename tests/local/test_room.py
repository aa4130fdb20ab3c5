"""A job that this machine cannot hold is refused before any process starts."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paceline import limits
from paceline.limits import MIB
from paceline.local.control import Control, ControlRefusal
from paceline.local.room import MPI_SHM_BYTES, MachineLimits, check_room, check_shared_memory
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.reading.load import load_job
from paceline_api.resolve import resolve
from paceline_api.settings import ResolvedJob
from paceline_api.types.enums import Backend

from testing.processes.runs import JOB, paceline

ROOMY = MachineLimits(processes=1 << 22, memory_bytes=1 << 50, own_bytes=30 * MIB)


@pytest.fixture
def job(tmp_path: Path) -> ResolvedJob:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(name="job", command="[python, train.py]", mark=""))
    return resolve(load_job(file, ["spec.procsPerReplica=4"]))


def refusal(job: ResolvedJob, replicas: int, room: MachineLimits) -> PacelineError:
    with pytest.raises(PacelineError) as refused:
        check_room(job, replicas, room)
    assert refused.value.exit_code == EXIT_BAD_INPUT
    return refused.value


def test_shared_memory_that_is_too_small_for_mpi_is_refused(job: ResolvedJob) -> None:
    check_shared_memory(job, 2, 8 * MPI_SHM_BYTES)
    mpi = replace(job, collective=replace(job.collective, backend=Backend.MPI))
    check_shared_memory(mpi, 2, 8 * MPI_SHM_BYTES)
    with pytest.raises(PacelineError) as refused:
        check_shared_memory(mpi, 2, 8 * MPI_SHM_BYTES - 1)
    assert "8.1 MiB of shared memory for 8 ranks" in refused.value.message
    assert "/dev/shm" in refused.value.message
    assert "gloo" in refused.value.hint
    check_shared_memory(job, 2, 0)  # gloo uses none


def test_a_job_that_fits_is_accepted(job: ResolvedJob) -> None:
    check_room(job, 2, ROOMY)
    check_room(job, 2, MachineLimits.of_this_machine())


def test_more_agents_than_metrics_ports_are_refused(job: ResolvedJob) -> None:
    error = refusal(replace(job, procs_per_replica=1), 300, ROOMY)
    assert "spec.metrics.port: 9464 leaves 257 ports for the agents of 300" in error.message
    assert "set it to 0" in error.hint
    check_room(replace(job, procs_per_replica=1, metrics_port=0), 300, ROOMY)


def test_more_processes_than_the_machine_allows_are_refused(job: ResolvedJob) -> None:
    error = refusal(job, 20, replace(ROOMY, processes=100))
    assert "20 x 4 ranks are 101 processes on this machine, and it allows 100" in error.message
    assert "--replicas" in error.hint


def test_more_memory_than_the_machine_has_is_refused(job: ResolvedJob) -> None:
    error = refusal(job, 20, replace(ROOMY, memory_bytes=3000 * MIB))
    assert "20 x 4 ranks take 3030 MiB of memory at least" in error.message
    assert "this machine has 3000 MiB" in error.message


def scaled(job: ResolvedJob, run_dir: Path, replicas: int) -> ControlRefusal | None:
    """Return the answer of a run of the job to `paceline scale`."""
    runner: Any = SimpleNamespace(view=lambda: SimpleNamespace(replicas=2))
    control = Control(job, run_dir, runner, sockets=run_dir, warn=print)
    return control._check(replicas)


def test_scaling_a_run_beyond_the_machine_is_refused(
    job: ResolvedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scale beyond the machine's memory, which used to start all ranks and block the runner."""
    small = replace(ROOMY, memory_bytes=3000 * MIB)
    monkeypatch.setattr(MachineLimits, "of_this_machine", lambda: small)
    refused = scaled(job, tmp_path, 20)
    assert refused is not None
    assert "20 x 4 ranks take 3030 MiB of memory at least" in refused.message
    assert "--replicas" in refused.hint
    assert scaled(job, tmp_path, 4) is None
    small = replace(ROOMY, processes=1)
    assert scaled(job, tmp_path, 1) is None, "what gets smaller needs no room"


def test_more_open_files_than_a_rank_may_have_are_refused(
    job: ResolvedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    error = refusal(job, 40, ROOMY)
    assert "each rank needs up to 1467 open files and sockets, and the limit is 1024" in (
        error.message
    )


def test_more_ranks_than_the_listen_backlog_are_refused(
    job: ResolvedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = tmp_path / "somaxconn"
    allowed.write_text("128\n")
    monkeypatch.setattr(limits, "SOMAXCONN", allowed)
    error = refusal(job, 40, ROOMY)
    assert "up to 159 connect to a rank at the same moment" in error.message


@pytest.mark.processes
def test_paceline_run_refuses_too_many_replicas_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(name="job", command="[nothing]", mark=""))
    code, output = paceline(tmp_path, "run", "job.yaml", "--replicas", "300", "--run-dir", "r")
    assert code == EXIT_BAD_INPUT
    assert output.startswith("error: spec.metrics.port: 9464 leaves 257 ports")
    assert not (tmp_path / "r").exists()
