"""A call of a program, or of a script, whose processes are all forked, as the test sees it."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from testing.processes import fork_server
from testing.processes.history import START_S, ForkServer, command_of, descendants

ENDS_S = 1.0


SERVERS: Final[dict[str, ForkServer]] = {}
"""Fork servers of this process, by their purpose."""


def the_fork_server(
    purpose: str = "calls", modules: Sequence[str] = fork_server.PRELOADED
) -> ForkServer:
    """Return a fork server of this process, which ends with it; the first call starts it.

    Args:
        purpose: A history counts and kills all processes of its fork server when it has ended. So
            processes that live longer than one test need a fork server of their own.
        modules: what it imports before it forks.

    Returns:
        The only fork server of this process for this purpose.
    """
    if purpose not in SERVERS:
        server = ForkServer(modules)
        server.__enter__()
        atexit.register(server.__exit__)
        SERVERS[purpose] = server
    return SERVERS[purpose]


def end_the_fork_servers() -> None:
    """End the fork servers of this process early."""
    while SERVERS:
        SERVERS.popitem()[1].__exit__()


OPEN: Final[set[ForkedCall]] = set()
"""Calls of this process that were not closed; a test that fails may leave some."""


class ForkedCall:
    """A call with an interface like `Popen`, and one text pipe for its output."""

    MODULE: ClassVar = "testing.processes.forked"
    """Module of the programs."""
    PURPOSE: ClassVar = "calls"
    PRELOADED: ClassVar[Sequence[str]] = fork_server.PRELOADED
    """What the fork server of this purpose has imported."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        program: str = "call",
        files: tuple[int, int] | None = None,
    ) -> None:
        """Start the call.

        Args:
            words: its arguments.
            folder: working directory.
            env: its whole environment.
            program: function of `MODULE` that it runs; `call` is `paceline`.
            files: open descriptors that become stdout and stderr instead of the pipe. The caller
                closes them.
        """
        out_read, out_write = os.pipe()
        stdout, stderr = files or (out_write, out_write)
        told_read, told_write = os.pipe()
        self._keeper = fork_server.ask(
            the_fork_server(self.PURPOSE, self.PRELOADED).name,
            "testing.processes.keeper:keep",
            arguments=[f"{self.MODULE}:{program}", list(words)],
            env=env,
            cwd=str(folder),
            fds={1: stdout, 2: stderr, 3: told_write},
            limit_s=START_S,
        )
        self._gone = os.pidfd_open(self._keeper)
        for fd in (out_write, told_write):
            os.close(fd)
        self._out, self._status = out_read, os.fdopen(told_read, "rb", buffering=0)
        self._output = b""
        self.pid = int(self._status.readline())
        self.returncode: int | None = None
        OPEN.add(self)

    def poll(self) -> int | None:
        """Return the exit code, or None while the call runs."""
        return self._wait(0.0)

    def wait(self, timeout: float = 0.0) -> int:
        """Return the exit code, or raise TimeoutExpired after `timeout` seconds."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def communicate(self, *, timeout: float) -> tuple[str, None]:
        """Read all output until its end and return it, as `Popen.communicate` does."""
        until = time.monotonic() + timeout
        while (left_s := until - time.monotonic()) > 0 and self._out >= 0:
            if select.select([self._out], [], [], left_s)[0]:
                part = os.read(self._out, 65_536)
                self._output += part
                if not part:
                    os.close(self._out)
                    self._out = -1
        self.wait(max(0.0, until - time.monotonic()))
        return self._output.decode(errors="replace"), None

    def lines(self) -> Iterator[str]:
        """Yield each line of the output as it comes, until its end; use it in one thread only."""
        out, self._out = self._out, -1
        with os.fdopen(out, errors="replace") as stream:
            for line in stream:
                yield line.rstrip("\n")

    def send_signal(self, number: int) -> None:
        """Send a signal to the call's own process if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the call's own process if it runs."""
        self.send_signal(signal.SIGKILL)

    def living(self) -> list[int]:
        """Return the pids of all its processes, however they are related; empty when all ended."""
        return descendants(self._keeper) if self._is_kept(0.0) else []

    def left_over(self) -> list[str]:
        """Return the command lines of processes that outlive the call by more than 1 s."""
        return [command_of(pid) for pid in self.living()] if self._is_kept(ENDS_S) else []

    def close(self) -> None:
        """Kill all processes of the call and release its descriptors."""
        OPEN.discard(self)
        while self._is_kept(0.02):
            for pid in self.living():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self._wait(0.0)
        self._status.close()
        for fd in {self._gone, self._out} - {-1}:
            os.close(fd)
        self._gone = self._out = -1

    def _is_kept(self, for_s: float) -> bool:
        return self._gone >= 0 and not select.select([self._gone], [], [], for_s)[0]

    def _wait(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._status.readline()))
        return self.returncode
