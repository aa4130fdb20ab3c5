"""A run without a terminal: `paceline run` as a process of its own, which stays when this one ends.

It says over a pipe when other terminals can ask for it. Until then it writes into another pipe, so
whoever started it sees why it did not come so far; from then on into a file of the run folder.
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
from paceline.local.index import Entry

RUN_LOG: Final = "run.log"
"""In the run folder: events and summary, as a run shows them on a terminal."""


class NotStartedError(PacelineError):
    """The run has ended before it began, in its own words."""

    def __init__(self, said: str, exit_code: int) -> None:
        error, _, hint = said.partition("\nhint: ")
        message = error.removeprefix("error: ") or f"the run has ended with code {exit_code}"
        super().__init__(message, hint=hint, exit_code=exit_code)


def start(words: Sequence[str], folder: Path, job: bytes = b"") -> Entry:
    """`words`: of `paceline run`, in `folder`; `job`: a job file for its stdin. NotStartedError."""
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as ready:  # noqa: PTH123
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli", "run", *words, "--ready-fd", str(write_end)],
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
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
            process.stdin.write(job)
            process.stdin.close()
        told = ready.read()
        if told:
            process.stdout.close()
            # A caller that lives on, such as a notebook, keeps no zombie of it.
            threading.Thread(target=process.wait, daemon=True).start()
            return msgspec.json.decode(told, type=Entry)
        said = process.stdout.read().decode(errors="replace").strip()
        raise NotStartedError(said, process.wait() or EXIT_FAILURE)


def listening(ready_fd: int, entry: Entry) -> None:
    """Called in the new process: say so, and write to the run folder from now on. What the ranks
    print is kept there anyway (`local.printed`)."""
    try:
        log = private_files.append(Path(entry.run_dir) / RUN_LOG)
    except OSError:  # a full disk does not keep a job from running
        log = os.open(os.devnull, os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream, target in ((sys.stdout, nothing), (sys.stderr, log)):
        stream.flush()
        os.dup2(target, stream.fileno())
        os.close(target)
    os.write(ready_fd, msgspec.json.encode(entry))
    os.close(ready_fd)
