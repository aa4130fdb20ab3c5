"""`paceline` as typed in a terminal: in a folder, with an environment of its own.

All processes of the commands are forked, those of a detached run as well: importing torch in each
would take most of the time of these tests.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from testing.processes.forked import ENV_DETACHED
from testing.processes.forked_call import ForkedCall, the_fork_server
from testing.processes.runs import end_of

LIMIT_S = 300.0


class Terminal:
    """Runner of commands in a folder; those that go on end with `close`."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = {**env, ENV_DETACHED: the_fork_server().name}
        self._started: list[Followed] = []

    def call(self, *words: str, code: int = 0) -> str:
        """Run a command that must end with `code`, and return its output."""
        ended, output = end_of(ForkedCall(words, self.folder, self.env))
        assert ended == code, (words, ended, output)
        assert "runtime/paceline" not in output, f"a traceback of ours: {output}"
        return output

    def start(self, *words: str) -> Followed:
        """Start a command that goes on."""
        self._started.append(Followed(ForkedCall(words, self.folder, self.env)))
        return self._started[-1]

    def status(self, job: str) -> dict[str, Any]:
        """Return the status of a job as JSON."""
        status: dict[str, Any] = json.loads(self.call("status", job, "-o", "json"))
        return status

    def close(self) -> None:
        """Kill all commands that were started and still run."""
        for one in self._started:
            one.close()


class Followed:
    """A command that goes on; its lines are read while it runs."""

    def __init__(self, call: ForkedCall) -> None:
        self.lines: list[str] = []
        self._call = call
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self.lines.extend(self._call.lines())

    def of(self, rank: int) -> list[str]:
        """Return the lines of one rank so far."""
        return [line for line in list(self.lines) if f"rank {rank} |" in line]

    def end(self) -> int:
        """Wait until the command ends by itself and return its exit code."""
        code = self._call.wait(LIMIT_S)
        self._thread.join(LIMIT_S)
        return code

    def close(self) -> None:
        """Kill the command if it runs."""
        self._call.close()
        self._thread.join(LIMIT_S)


def until(holds: Callable[[], object], what: str) -> None:
    """Poll until a condition holds, or fail with `what` after LIMIT_S seconds."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, f"not {what}"
        time.sleep(0.1)
