"""`paceline` as a process, for tests. A run has a folder of its own and always ends.

Importing torch is most of the work of a small job. Tests about what a job does, not about how its
programs start, fork all processes from one that has imported torch: `ForkedRun` and
`forked_paceline`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Self

from testing.processes.forked_call import ForkedCall

PACELINE = Path(sys.executable).parent / "paceline"
LIMIT_S = 240.0
GONE_S = 30.0
JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  replicas: 2
  collective: {{backend: gloo}}
  template:
    spec:
      containers:
      - name: trainer
        image: none
        command: {command}
        env: [{{name: MARK, value: "{mark}"}}]
"""


def paceline(folder: Path, *words: str, **env: str) -> tuple[int, str]:
    """Run the program to its end and return its exit code and output."""
    done = subprocess.run(
        [PACELINE, *words],
        cwd=folder,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def forked_paceline(folder: Path, *words: str, **env: str) -> tuple[int, str]:
    """Run the program with forked processes; none of them may live at its end."""
    return end_of(ForkedCall(words, folder, os.environ | env))


def end_of(call: ForkedCall, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Wait for a call and return its exit code and output; no process of it may be left.

    Args:
        call: The call.
        limit_s: Upper bound of its duration, in seconds.

    Returns:
        Exit code and output.
    """
    try:
        output, _ = call.communicate(timeout=limit_s)
        assert call.left_over() == []
    finally:
        call.close()
    return call.wait(), output


def joined(output: str) -> set[str]:
    """Return the ranks that a run's summary names as joiners, alone or several in one change."""
    lists = re.findall(r"ranks? (\S+(?:, \S+)*) joins? ", output)
    return {rank for listed in lists for rank in listed.split(", ")}


class Run:
    """One `paceline run`; `mark` is in the environment of its ranks."""

    def __init__(
        self,
        folder: Path,
        command: str,
        *words: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the run; `env` replaces the whole environment of the tests."""
        self.folder = folder
        self.mark = f"paceline-test-{os.getpid()}-{folder.name}"
        (folder / "job.yaml").write_text(JOB.format(name="job", command=command, mark=self.mark))
        self.process = subprocess.Popen(
            [PACELINE, "run", "job.yaml", *words],
            cwd=folder,
            env={**(os.environ if env is None else env), "MARK": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> tuple[int, str]:
        """Return exit code and output; no process of the run may be left."""
        try:
            output, _ = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert processes_with(self.mark) == []
        return self.process.returncode, output

    def until_gone(self) -> None:
        """Wait at most 30 s for the end of what a killed run has left; a drain takes longer."""
        end = time.monotonic() + GONE_S
        while left := processes_with(self.mark):
            assert time.monotonic() < end, left
            time.sleep(0.1)

    def until(self, text: str) -> None:
        """Wait until a log of the run contains a text."""
        until_logged(self.folder, text)


class ForkedRun:
    """One `paceline run` with forked processes; only ranks without a Python script are executed."""

    def __init__(
        self,
        folder: Path,
        command: str,
        *words: str,
        name: str = "job",
        before: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the run.

        Args:
            folder: working directory.
            command: command of the trainer, as YAML.
            words: further arguments of `paceline run`.
            name: name of the job.
            before: shell commands that may mount file systems that only this run sees.
            env: replaces the whole environment of the tests.
        """
        (folder / f"{name}.yaml").write_text(JOB.format(name=name, command=command, mark=""))
        env = os.environ if env is None else env
        words = ("run", f"{name}.yaml", *words)
        if before:
            self.process = ForkedCall((before, *words), folder, env, "call_inside")
        else:
            self.process = ForkedCall(words, folder, env)
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()

    def wait(self) -> tuple[int, str]:
        """Return exit code and output; no process of the run may be left."""
        return end_of(self.process)

    def until(self, text: str, run: str = "*") -> None:
        """Wait until a log in the run folder of that name contains the text."""
        until_logged(self._folder, text, run)

    def until_gone(self) -> None:
        """Wait for the end of what a killed run has left."""
        try:
            self.process.communicate(timeout=LIMIT_S)
            end = time.monotonic() + GONE_S
            while left := self.process.left_over():
                assert time.monotonic() < end, left
        finally:
            self.process.close()


def until_logged(folder: Path, text: str, run: str = "*") -> None:
    """Wait until a log of a run below `folder` contains `text`."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        logs = folder.glob(f"runs/{run}/**/*.log")
        if any(text in log.read_text() for log in logs):
            return
        time.sleep(0.05)
    raise AssertionError(f"no log says {text!r}")


@cache
def may_mount() -> bool:
    """Return True if this user may mount a file system that only own processes see."""
    if shutil.which("unshare") is None:
        return False
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = ["mount", "-t", "tmpfs", "none", "/mnt"]
    return (
        subprocess.run(["unshare", *user, "--mount", *mount], capture_output=True).returncode == 0
    )


def processes_with(mark: str) -> list[str]:
    """Return the command lines of all processes with the mark in their environment."""
    commands = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    commands.append((entry / "cmdline").read_text())
            except OSError:
                continue  # gone, or not ours
    return commands
