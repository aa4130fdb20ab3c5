"""pytest plugin that fails a run which leaves processes, temporary folders or files of MPI.

The run gets its own TMPDIR, so anything in it at the end with a name of Paceline's or MPI's is its
own. What programs keep for their user goes there as well: notes of jobs, caches of kubectl. The run
also gets a mark in the environment, which each process below it inherits. Other jobs and test runs
of this user at the same time do not matter. If the run is killed, the next one removes its TMPDIR
(`testing.temporary`). With `pytest --numprocesses` the controller looks when its workers have
ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from testing import left_files
from testing.processes import forked_call
from testing.temporary import ENV_RUN, PREFIX, OwnFolder

OURS: Final = ("paceline-*", "hydra_*", "mpich_*", f"{PREFIX}*")
KEPT: Final = {"XDG_STATE_HOME": "state", "KUBECACHEDIR": "kube", "IPYTHONDIR": "ipython"}
"""Variables that say where programs keep something for their user -> folder of the run for it."""
PATIENCE_S: Final = 10.0
"""How long to wait for the end of what the last tests have stopped."""


class LeftOvers:
    """Plugin that looks for leftovers before the first test and after the last one."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        own = ("TMPDIR", "PYTEST_DEBUG_TEMPROOT", *KEPT)
        self._outer = {name: os.environ.get(name) for name in own}
        # Folders of single tests stay where pytest puts them, so that people can inspect them.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._own_folder = OwnFolder()
        self.folder = self._own_folder.path
        self.mark = f"{ENV_RUN}={self.folder.name}-{os.getpid()}"
        os.environ["TMPDIR"] = str(self.folder)
        os.environ |= {name: str(self.folder / place) for name, place in KEPT.items()}
        os.environ[ENV_RUN] = self.mark.partition("=")[2]
        tempfile.tempdir = None
        self.left: list[str] = []
        self._own = left_files.OwnFiles(lambda: pids_with(self.mark), self.folder)
        self._own.__enter__()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Look after the fixtures and workers have ended, before the summary."""
        yield
        forked_call.end_the_fork_servers()
        self.left = self.look()
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List what was left behind."""
        if self.left:
            terminalreporter.section("left behind by this test run", sep="=", red=True)
            for line in self.left:
                terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        """Restore the environment and remove the TMPDIR."""
        for name, text in self._outer.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
        os.environ.pop(ENV_RUN, None)
        tempfile.tempdir = None
        self._own.__exit__()
        self._own_folder.close()

    def look(self) -> list[str]:
        """Return what is left, after waiting for what is about to end."""
        until = time.monotonic() + self._patience_s
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.2)
        self._own.look()
        return left + [f"file {path}" for path in self._own.left()]

    def _left(self) -> list[str]:
        processes = [f"process {text}" for text in processes_with(self.mark)]
        files = sorted(str(path) for pattern in OURS for path in self.folder.glob(pattern))
        return processes + [f"file {path}" for path in files]


def pids_with(mark: str) -> list[int]:
    """Return all other processes that have NAME=VALUE in their environment."""
    pids = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
    return pids


def processes_with(mark: str) -> list[str]:
    """Return pid and command line of each process with the mark."""
    processes = []
    for pid in pids_with(mark):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            # multiprocessing ends its tracker together with this process.
            if words and "multiprocessing.resource_tracker" not in words:
                processes.append(f"{pid} {words}")
    return sorted(processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Close the calls that a test has begun and not closed when it fails.

    A test that passes and leaves some is not helped, so that the run reports them. A test that
    starts MPI in this process fails, since tests after it would find it started in its way.

    Yields:
        while the test runs.
    """
    before = set(forked_call.OPEN)
    started = mpi_is_started()
    try:
        yield
    except BaseException:
        for call in forked_call.OPEN - before:
            call.close()
        raise
    if mpi_is_started() and not started:
        pytest.fail("the test has started MPI in pytest's own process; start it in a process below")


def mpi_is_started() -> bool:
    """Return whether MPI is initialized in this process, without importing it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized()


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, except in workers and in runs that a test starts."""
    # In a run that a test starts, the plugin of the outer run is responsible.
    if not hasattr(config, "workerinput") and ENV_RUN not in os.environ:
        config.pluginmanager.register(LeftOvers(), "left-overs")
