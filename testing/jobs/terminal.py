"""`paceline` as typed in a terminal: in a folder, with an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PACELINE = Path(sys.executable).parent / "paceline"
LIMIT_S = 300.0


class Terminal:
    """Runner of commands in a folder; those that go on end with `close`."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self.env = folder, env
        self._started: list[Followed] = []

    def call(self, *words: str, code: int = 0) -> str:
        """Run a command that must end with `code`, and return its output."""
        done = subprocess.run(
            [PACELINE, *words], cwd=self.folder, env=self.env, text=True, timeout=LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == code, (words, done)
        assert "runtime/paceline" not in done.stdout, f"a traceback of ours: {done.stdout}"
        return done.stdout

    def start(self, *words: str) -> Followed:
        """Start a command that goes on."""
        self._started.append(Followed(self, words))
        return self._started[-1]

    def status(self, job: str) -> dict[str, Any]:
        """Return the status of a job as JSON."""
        found: dict[str, Any] = json.loads(self.call("status", job, "-o", "json"))
        return found

    def close(self) -> None:
        """Kill all commands that were started and still run."""
        for one in self._started:
            one.close()


class Followed:
    """A command that goes on; its lines are read while it runs."""

    def __init__(self, terminal: Terminal, words: tuple[str, ...]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [PACELINE, *words], cwd=terminal.folder, env=terminal.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            self.lines.extend(line.rstrip("\n") for line in said)

    def of(self, rank: int) -> list[str]:
        """Return the lines of one rank so far."""
        return [line for line in list(self.lines) if f"rank {rank} |" in line]

    def end(self) -> int:
        """Wait until the command ends by itself and return its exit code."""
        code = self.process.wait(LIMIT_S)
        self._thread.join(LIMIT_S)
        return code

    def close(self) -> None:
        """Kill the command if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.end()


def until(holds: Callable[[], object], what: str) -> None:
    """Poll until a condition holds, or fail with `what` after LIMIT_S seconds."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, f"not {what}"
        time.sleep(0.1)
