"""`make test` and `make test-all`: run the checks, the tests, and the build that tests need.

Three processes share the cores. The first builds the Kubernetes of the tests (nothing, if it
exists), the second runs the checks of `scripts/check.py`, the third is pytest. Tests that need what
is being built wait for the build; all others run meanwhile. The build gets a higher priority where
the user may set one (root): the tests that wait for it mostly wait for the cluster as well, and
then leave the cores to the others.

The exit code is 0 only if all three succeeded. Outside CI, a failed build is reported and its tests
are skipped by name; with CI=true it is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from testing.examples import ENV_SHARE
from testing.temporary import temporary_folder

ROOT = Path(__file__).resolve().parent.parent
PYTEST = Path(sys.executable).parent / "pytest"
ENV_BUILD_LOCK = "PACELINE_TEST_BUILD_LOCK"
"""Path of a file that the builder holds a lock on until it ends. tests/conftest.py waits for it."""
ENV_WRITE_DURATIONS = "PACELINE_TEST_WRITE_DURATIONS"
EXAMPLES_PERCENT = "10"
"""Share of the examples of each property that `make test` draws. `make test-all` draws all."""
BUILD_TIMEOUT_S = 3600
BUILD_NICE = -10
CHECK_TIMEOUT_S = 900
DEFAULT_LANES = (os.cpu_count() or 1) + 2
"""One test process per core, and two for the tests that mostly wait, such as those on Kubernetes.
"""


class Aside:
    """A process beside the tests; its output is shown as a whole after it has ended."""

    def __init__(self, name: str, argv: list[str], *, keep_fds: tuple[int, ...] = ()) -> None:
        self.name = name
        self._started = time.monotonic()
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=keep_fds,
            start_new_session=True,
        )

    def go_first(self) -> None:
        """Give the process a larger share of the cores, if that is allowed."""
        pid = self._process.pid
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, BUILD_NICE)
            # With autogroup scheduling, the session has a nice value, too.
            Path(f"/proc/{pid}/autogroup").write_text(str(BUILD_NICE))

    def finish(self, timeout_s: float) -> bool:
        """Wait for the end, print the output, and return True if the process succeeded."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._end(signal.SIGKILL)
            code = -1
        took_s = time.monotonic() - self._started
        self._output.seek(0)
        text = self._output.read()
        self._output.close()
        ending = (
            "ok" if code == 0 else "FAILED" if code > 0 else f"not over after {timeout_s:.0f} s"
        )
        sys.stdout.write(f"\n{'-' * 20} {self.name}: {ending} {'-' * 20}\n{text}")
        sys.stdout.write(f"{self.name} ended within {took_s:.0f} s of the start\n")
        sys.stdout.flush()
        return code == 0

    def kill(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started, which share its session."""
        os.killpg(self._process.pid, number)
        self._process.wait()


def main() -> int:
    """Run build, checks and tests side by side and return the exit code."""
    parser = argparse.ArgumentParser(prog="run_tests", description=__doc__)
    parser.add_argument("--all", action="store_true", help="the exhaustive tests as well")
    parser.add_argument("--lanes", type=int, default=DEFAULT_LANES, help="tests side by side")
    parser.add_argument("--durations", action="store_true", help="rewrite tests/durations.json")
    parser.add_argument("rest", nargs="*", help="arguments for pytest")
    options = parser.parse_args()
    started = time.monotonic()
    # Without bytecode, thousands of processes would compile the same sources again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # On SIGTERM, this process ends its children and removes its folder.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with temporary_folder() as folder:
        lock = folder / "build.lock"
        lock.touch()
        programs = "programs-for-all-tests" if options.all else "programs-for-tests"
        module = [sys.executable, "-m", "testing.cluster", programs]
        with lock.open() as held:  # the builder inherits the lock and releases it by ending
            fcntl.flock(held, fcntl.LOCK_EX)
            build = Aside("build", module, keep_fds=(held.fileno(),))
            build.go_first()
        check = Aside("check", [sys.executable, "scripts/check.py"])
        try:
            own = {ENV_WRITE_DURATIONS: "1"} if options.durations else {}
            chosen = []
            if not options.all:
                own[ENV_SHARE] = EXAMPLES_PERCENT
                chosen = ["-m", "not exhaustive"]
            tests = subprocess.run(
                [PYTEST, "--numprocesses", str(options.lanes), *chosen, *options.rest],
                cwd=ROOT,
                env=os.environ | {ENV_BUILD_LOCK: str(lock)} | own,
                check=False,
            )
            built = build.finish(BUILD_TIMEOUT_S)
            checked = check.finish(CHECK_TIMEOUT_S)
        finally:
            build.kill()
            check.kill()
    passed = tests.returncode == 0 and checked and built
    took = time.monotonic() - started
    words = {True: "passed", False: "FAILED"}
    sys.stdout.write(
        f"\ntests {words[tests.returncode == 0]}, check {words[checked]}, build {words[built]};"
        f" {int(took) // 60} min {int(took) % 60} s in all\n"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
