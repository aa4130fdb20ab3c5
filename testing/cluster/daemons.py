"""Programs that the harness starts and ends: by pid, with a log each, no longer than their owner.

The kernel kills them when the process that started them is gone, however it went, so that a test
run that is killed leaves no API server behind. Only what was started here is ever signalled.
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
    """A program ended, or was not ready in time; the message has the end of its log."""


class Daemon:
    """One program with one log. It can be stopped and started again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        forks: bool = False,
    ) -> None:
        """`forks`: the command only waits for one child, and that is the program that is meant."""
        self.name = name
        self.log = log
        self._command = [str(word) for word in command]
        self._environment = dict(environment or {})
        self._forks = forks
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
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
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already, pid {self.pid}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment,
                # A Ctrl-C at the terminal is for the owner, who then stops the programs in order.
                start_new_session=True,
            )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask it to end; make it end when it does not in time."""
        if not self.alive:
            return
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            self._wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self.alive:
            self._signal(signal.SIGKILL)
            self._wait(KILL_TIMEOUT_S)

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def wait_until(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until `ready`; at once an error when the program has ended."""
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
        if not self.log.is_file():
            return ""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def cpu_seconds(self) -> float:
        """User and system time of the program since its last start, without its children."""
        # The name, second and in parentheses, may hold spaces.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def memory_peak_bytes(self) -> int:
        """The most that it has held in memory since its last start."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise DaemonError(f"{self.name} has no memory: it has ended")

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} was not started"
        if not self._forks:
            self._process.send_signal(number)
            return
        try:
            os.kill(self.pid, number)
        except (DaemonError, FileNotFoundError, ProcessLookupError):
            # It ended since we looked, and its waiter is about to.
            return

    def _wait(self, timeout_s: float) -> None:
        assert self._process is not None, f"{self.name} was not started"
        self._process.wait(timeout_s)
