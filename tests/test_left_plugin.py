"""The pytest plugin that fails a test run which leaves files or processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.local.index import folders

from testing.left_plugin import KEPT, LeftOvers
from testing.temporary import ENV_RUN, PREFIX, sweep
from tests.layers import exhaustive

ROOT = Path(__file__).parent.parent


@pytest.fixture
def look() -> Iterator[LeftOvers]:
    """Yield the plugin of a test run inside this one."""
    outer = {name: os.environ.get(name) for name in (ENV_RUN, "TMPDIR", *KEPT)}
    left = LeftOvers(patience_s=0.5)
    yield left
    left.pytest_unconfigure()
    os.environ.update({name: text for name, text in outer.items() if text is not None})
    tempfile.tempdir = None


def test_programs_keep_nothing_for_their_user_outside_the_folder_of_the_run(
    look: LeftOvers,
) -> None:
    """A runner that was killed, and kubectl, have left files in the home of whoever ran tests."""
    state = folders(os.environ | {"XDG_RUNTIME_DIR": ""})[0]
    assert state == look.folder / "state/paceline"
    assert Path(os.environ["KUBECACHEDIR"]).parent == look.folder
    assert Path(os.environ["IPYTHONDIR"]).parent == look.folder


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["paceline-run-", "paceline-", "hydra_", PREFIX])
def test_a_temporary_folder_that_is_left_is_found(look: LeftOvers, prefix: str) -> None:
    assert look.look() == []
    folder = tempfile.mkdtemp(prefix=prefix)
    assert look.look() == [f"file {folder}"]
    Path(folder).rmdir()
    assert look.look() == []


@pytest.mark.long
@pytest.mark.parametrize("command", ["exec sleep 77", "setsid sleep 78 & exit"])
def test_a_process_that_is_left_is_found_even_without_its_parent(
    look: LeftOvers, command: str
) -> None:
    child = subprocess.Popen(["sh", "-c", command])
    if "&" in command:
        child.wait()
    [line] = until_found(look)
    assert "sleep 7" in line
    os.kill(int(line.split()[1]), signal.SIGKILL)
    child.wait()
    assert look.look() == []


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_next_run_removes_the_folder_of_a_killed_run(tmp_path: Path) -> None:
    """Files of a Paceline run inside that folder are removed too."""
    base, test = tmp_path / "tmp", tmp_path / "test_it.py"
    base.mkdir()
    test.write_text(
        "import os, signal, tempfile\n"
        "def test_it():\n"
        "    tempfile.mkdtemp(prefix='paceline-run-')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_pytest(tmp_path, TMPDIR=str(base)).returncode == -signal.SIGKILL
    (folder,) = base.iterdir()
    assert folder.name.startswith(PREFIX)
    assert list(folder.glob("paceline-run-*"))
    test.write_text("def test_it(): pass\n")
    done = run_pytest(tmp_path, TMPDIR=str(base))
    assert done.returncode == 0, done.stdout
    assert list(base.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize(("ends", "closed"), [("assert False", "begun"), exhaustive("pass", "")])
def test_processes_started_by_a_failed_test_are_closed(
    tmp_path: Path, ends: str, closed: str
) -> None:
    """Only processes that the failed test itself started are closed.

    After a passing test the plugin reports them instead; older processes are not touched.
    """
    (tmp_path / "test_it.py").write_text(
        "import pathlib, pytest\n"
        "from testing.processes import forked_call\n"
        "class Call:\n"
        "    def __init__(self, name): self.name = name; forked_call.OPEN.add(self)\n"
        "    def close(self): pathlib.Path('closed').open('a').write(self.name)\n"
        "@pytest.fixture\n"
        "def before(): Call('before')\n"
        f"def test_it(before): Call('begun'); {ends}\n"
    )
    run_pytest(tmp_path)
    file = tmp_path / "closed"
    assert (file.read_text() if file.exists() else "") == closed


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_test_that_starts_mpi_in_the_process_of_pytest_fails(tmp_path: Path) -> None:
    """The next tests of the process would find MPI started in another way than Paceline's."""
    (tmp_path / "test_it.py").write_text(
        "def test_it():\n    from mpi4py import MPI\n    assert MPI.Is_initialized()\n"
        "def test_next(): pass\n"
    )
    run = run_pytest(tmp_path)
    assert "1 failed, 1 passed" in run.stdout, run.stdout
    assert "start it in a process below" in run.stdout, run.stdout


@pytest.mark.processes
def test_the_folder_of_a_run_in_progress_is_not_removed(look: LeftOvers) -> None:
    sweep(look.folder.parent)
    assert look.folder.is_dir()


def until_found(look: LeftOvers) -> list[str]:
    """Wait until a process is found; one that is calling exec shows no environment."""
    until = time.monotonic() + 30
    while not (left := look.look()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return left


def run_pytest(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a separate process that checks for leftovers."""
    outer = {n: v for n, v in os.environ.items() if n not in (ENV_RUN, "PYTEST_DEBUG_TEMPROOT")}
    words = ("-p", "testing.left_plugin", "-q", *words, "test_it.py")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), *words],
        cwd=folder,
        env=outer | {"PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", ["0", "1"])
def test_leftovers_fail_the_test_run(tmp_path: Path, workers: str) -> None:
    test = "import tempfile\ndef test_it():\n    tempfile.mkdtemp(prefix='paceline-run-')\n"
    (tmp_path / "test_it.py").write_text(test)
    run = run_pytest(tmp_path, "--numprocesses", workers)
    assert "1 passed" in run.stdout, run.stdout
    assert run.returncode == 1, run.stdout
    assert "left behind by this test run" in run.stdout, run.stdout
