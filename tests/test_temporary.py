"""Temporary folders of a killed test run, benchmark or tool are removed by the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paceline import scratch

from testing.temporary import PREFIX, sweep, temporary_folder

ROOT = Path(__file__).parent.parent
OWNER = """
import pathlib, signal, sys
from testing.temporary import temporary_folder
with temporary_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    signal.pause()
"""
FUZZ = """
import signal
from testing.fuzz.driver import run
from testing.fuzz.target import Target

def start(stack, folder):
    print(folder, flush=True)
    signal.pause()

run(Target("none", start, (ValueError,), (b"x",)), 1)
"""
PIPELINE = """
import signal
from benchmarks import jobs, pipeline

def run(order, cwd, **_):
    print(cwd, flush=True)
    signal.pause()

jobs.subprocess.run = run
pipeline.train(pipeline.SMOKE[0], 1, {}, 1, 0.1)
"""


def started(code: str, base: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start an owner, and return its process and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(base)],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(base), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_temporary_folder_is_removed_at_the_end_of_its_block(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(PREFIX)
        (folder / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_only_folders_of_killed_owners_are_removed_by_the_next_owner(tmp_path: Path) -> None:
    (living, own), (dead, left) = started(OWNER, tmp_path), started(OWNER, tmp_path)
    try:
        killed(dead)
        assert (left / "file").exists()
        with temporary_folder(tmp_path):
            assert not left.exists()
            assert (own / "file").exists()
    finally:
        killed(living)


@pytest.mark.processes
def test_a_folder_stays_while_a_process_works_in_it(tmp_path: Path) -> None:
    owner, left = started(OWNER, tmp_path)
    killed(owner)
    job = subprocess.Popen(["sleep", "600"], cwd=left)
    try:
        sweep(tmp_path)
        assert (left / "file").exists()
    finally:
        job.kill()
        job.wait()
    sweep(tmp_path)
    assert not left.exists()


@pytest.mark.processes
@pytest.mark.parametrize("code", [FUZZ, PIPELINE], ids=["fuzz", "pipeline"])
def test_folders_left_by_a_killed_tool_are_removed(tmp_path: Path, code: str) -> None:
    tool, _ = started(code, tmp_path)
    killed(tool)
    assert list(tmp_path.iterdir()) != []
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_locked_or_removed_by_another_process_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[Path], int | None] = scratch._lock
    answers = [BlockingIOError(), None]

    def lock(path: Path) -> int | None:
        answer = answers.pop(0) if answers else real(path)
        if isinstance(answer, BlockingIOError):
            raise answer
        return answer

    monkeypatch.setattr(scratch, "_lock", lock)
    with temporary_folder(tmp_path) as folder:
        assert (folder / scratch.LOCK).exists()
