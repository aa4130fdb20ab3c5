"""A test run that leaves something fails, whatever its tests say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.left_plugin import ENV_RUN, LeftOvers

ROOT = Path(__file__).parent.parent


@pytest.fixture
def look() -> Iterator[LeftOvers]:
    """A run inside this one."""
    outer = {name: os.environ.get(name) for name in (ENV_RUN, "TMPDIR")}
    left = LeftOvers(patience_s=0.5)
    yield left
    left.pytest_unconfigure()
    os.environ.update({name: text for name, text in outer.items() if text is not None})
    tempfile.tempdir = None


@pytest.mark.parametrize("prefix", ["paceline-run-", "paceline-", "hydra_"])
def test_a_temporary_folder_is_left(look: LeftOvers, prefix: str) -> None:
    assert look.look() == []
    folder = tempfile.mkdtemp(prefix=prefix)
    assert look.look() == [f"file {folder}"]
    Path(folder).rmdir()
    assert look.look() == []


@pytest.mark.parametrize("command", ["exec sleep 77", "setsid sleep 78 & exit"])
def test_a_process_is_left_wherever_its_parents_are(look: LeftOvers, command: str) -> None:
    child = subprocess.Popen(["sh", "-c", command])
    if "&" in command:
        child.wait()
    [line] = look.look()
    assert "sleep 7" in line
    os.kill(int(line.split()[1]), signal.SIGKILL)
    child.wait()
    assert look.look() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_is_left_fails_the_run(tmp_path: Path, workers: str) -> None:
    test = "import tempfile\ndef test_it():\n    tempfile.mkdtemp(prefix='paceline-run-')\n"
    (tmp_path / "test_it.py").write_text(test)
    words = ["-p", "testing.left_plugin", "-q", "--numprocesses", workers, "test_it.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), *words],
        cwd=tmp_path,
        env={n: v for n, v in os.environ.items() if n != ENV_RUN} | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    assert "1 passed" in run.stdout, run.stdout
    assert run.returncode == 1, run.stdout
    assert "left behind by this test run" in run.stdout, run.stdout
