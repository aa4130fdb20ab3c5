"""Programs that the harness starts and stops by pid, with one log each.

The kernel kills them when the process that started them is gone, however it ended, so a test run
that is killed leaves no API server behind. Only processes that were started here are signaled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 10.0
LOG_TAIL_BYTES = 6000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class DaemonError(Exception):
    """Raised when a program exited or was not ready in time; includes the end of its log."""


class Daemon:
    """One program with one log; it can be stopped and started again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        forks: bool = False,
    ) -> None:
        """Prepare the program; with `forks`, signals and pid apply to the command's only child."""
        self.name = name
        self.log = log
        self._command = [str(word) for word in command]
        self._environment = dict(environment or {})
        self._forks = forks
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the program, or with `forks` of the command's child."""
        assert self._process is not None, f"{self.name} was not started"
        pid = self._process.pid
        if not self._forks:
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            raise DaemonError(f"{self.name} has not started its child yet:\n{self.log_tail()}")
        return int(children[0])

    @property
    def alive(self) -> bool:
        """True while the process that was started has not exited."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the program and append its output to the log; it must not be running."""
        assert not self.alive, f"{self.name} runs already, pid {self.pid}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment,
                # A Ctrl-C at the terminal goes to the owner, which stops the programs in order.
                start_new_session=True,
            )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Send SIGTERM, and SIGKILL if the program has not exited after `timeout_s`."""
        if not self.alive:
            return
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            self._wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL and wait, if the program is running."""
        if self.alive:
            self._signal(signal.SIGKILL)
            self._wait(KILL_TIMEOUT_S)

    def pause(self) -> None:
        """Send SIGSTOP: the program keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def wait_until(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll until `ready`; raise DaemonError at once if the program has exited."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.alive:
                raise DaemonError(f"{self.name} ended before {what}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise DaemonError(
                    f"{self.name}: not {what} within {timeout_s} s:\n{self.log_tail()}"
                )
            time.sleep(0.05)

    def log_tail(self) -> str:
        """Return the last 6000 bytes of the log."""
        if not self.log.is_file():
            return ""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def cpu_seconds(self) -> float:
        """Return user and system time since the last start, without child processes."""
        # The name, second and in parentheses, may hold spaces.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} was not started"
        if not self._forks:
            self._process.send_signal(number)
            return
        try:
            os.kill(self.pid, number)
        except (DaemonError, FileNotFoundError, ProcessLookupError):
            # The child has just ended, and its parent is about to end.
            return

    def _wait(self, timeout_s: float) -> None:
        assert self._process is not None, f"{self.name} was not started"
        self._process.wait(timeout_s)
