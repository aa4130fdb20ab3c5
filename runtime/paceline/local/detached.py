"""Detached run: `paceline run` as a process of its own, which outlives the one that started it.

The new process reports over a pipe when other terminals can reach its job. Until then its output
goes to a second pipe, so the starting process can show why a start has failed. From then on the
output goes to a file of the run folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from paceline_api.errors import EXIT_FAILURE, PacelineError

from paceline import private_files
from paceline.local.index import RunEntry

RUN_LOG: Final = "run.log"
"""File of the run folder with events and summary, as a run shows them on a terminal."""


class NotStartedError(PacelineError):
    """Raised if the run ends before its job can be reached; has the run's own message.

    Args:
        output: Output of the run.
        exit_code: Exit code of the run.
    """

    def __init__(self, output: str, exit_code: int) -> None:
        error, _, hint = output.partition("\nhint: ")
        message = error.removeprefix("error: ") or f"the run has ended with code {exit_code}"
        super().__init__(message, hint=hint, exit_code=exit_code)


def start(words: Sequence[str], folder: Path, job: bytes = b"") -> RunEntry:
    """Start a detached run, and return when its job can be reached.

    Args:
        words: Arguments of `paceline run`.
        folder: Working directory of the run.
        job: A job file, which the run reads from its stdin.

    Returns:
        The entry by which other terminals find the job.

    Raises:
        NotStartedError: The run has ended before.
    """
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as ready:  # noqa: PTH123
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", "--ready-fd", str(write_end), *words],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[write_end],
        )
        os.close(write_end)
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its output says why
            process.stdin.write(job)
            process.stdin.close()
        report = ready.read()
        if report:
            process.stdout.close()
            # A caller that lives on, such as a notebook, must not keep a zombie.
            threading.Thread(target=process.wait, daemon=True).start()
            return msgspec.json.decode(report, type=RunEntry)
        output = process.stdout.read().decode(errors="replace").strip()
        raise NotStartedError(output, process.wait() or EXIT_FAILURE)


def listening(ready_fd: int, entry: RunEntry) -> None:
    """Report to the starting process that the job can be reached, and detach from it.

    Called in the new process. From now on its messages go to RUN_LOG. What the ranks print is kept
    elsewhere (`local.rundir`).

    Args:
        ready_fd: Write end of the pipe to the starting process; closed afterwards.
        entry: The entry by which other terminals find the job.
    """
    try:
        log = private_files.append(Path(entry.run_dir) / RUN_LOG)
    except OSError:  # a full disk must not prevent the job from running
        log = os.open(os.devnull, os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream, target in ((sys.stdout, nothing), (sys.stderr, log)):
        stream.flush()
        os.dup2(target, stream.fileno())
        os.close(target)
    os.write(ready_fd, msgspec.json.encode(entry))
    os.close(ready_fd)
