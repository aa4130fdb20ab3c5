"""Folder of one local run: what its ranks print, and its last status. Runs never share a folder.

Every line that the ranks print is kept with its time in the file PRINTED. A line is `TIME AGENT
TEXT`, with the time as a kubelet writes it and the text as the agent passed it on. The lines are in
order of time, because one process writes them as they come.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from paceline_api.bounded import read_file
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, printable
from paceline_api.status import Status, StatusError, decode_status
from paceline_api.times import NS_PER_S

from paceline import private_files
from paceline.clock import wall_s
from paceline.function.packed import FOLDER

RUNS: Final = Path("runs")
"""Default folder of runs, relative to the working directory."""
RUNS_MAX: Final = 100_000
"""Upper bound on the number of a run."""
LOCK: Final = "run.pid"
"""File that marks the folder as taken; holds the pid of its runner."""
PRINTED: Final = "printed.log"
"""File with every line that the ranks have printed."""
STATUS: Final = "status.json"
"""File with the last status: how the run ended and what it had done."""
STATUS_BYTES_MAX: Final = 32 * 2**20
"""Twice the largest answer of a runner (`local.control`), because the file has line breaks and
indents."""
CONTROL: Final = "control"
"""Name of the runner's socket, in the temporary folder of the run (`paceline.scratch`)."""
WHAT: Final = "run folder"
"""Name of a run folder in error messages."""
WHAT_RUNS: Final = "folder of runs"
"""Name of a folder of runs in error messages."""


class RunDirError(PacelineError):
    """Raised if a run folder cannot be used.

    Args:
        path: The folder.
        problem: What is wrong with it.
        hint: What to do.
    """

    def __init__(self, path: Path, problem: str, *, hint: str) -> None:
        super().__init__(f"run folder {path}: {problem}", hint=hint, exit_code=EXIT_BAD_INPUT)


def make_run_dir(job: str, wanted: Path | None) -> Path:
    """Return the folder for a new run of this job, as an absolute path.

    Args:
        job: Name of the job.
        wanted: Folder that the user has named. It must be new, empty, or made by `with_function`.
            None: take the next free runs/<job>-<n>.

    Returns:
        The folder, marked as taken.

    Raises:
        RunDirError: The folder cannot be used.
    """
    path = _take_next(job, RUNS) if wanted is None else _take(wanted)
    path = path.resolve()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        (path / LOCK).unlink(missing_ok=True)
        raise RunDirError(
            Path(printable(str(path))),
            "has a path that is not UTF-8, which no message can carry",
            hint="work in another folder, or name one with --run-dir",
        ) from None
    write(path, LOCK, f"{os.getpid()}\n")
    return path


def with_function(job: str, runs: Path, files: Mapping[str, str]) -> Path:
    """Make the next free run folder below `runs`, with the files of a function as its program."""
    path = _take_next(job, runs).resolve()
    try:
        (path / FOLDER).mkdir(private_files.FOLDER_MODE)
    except OSError as error:
        raise _unusable(path, error) from None
    for name, text in files.items():
        write(path / FOLDER, name, text)
    return path


def write(run_dir: Path, name: str, text: str) -> None:
    """Write a file without which there can be no run; RunDirError if that fails."""
    try:
        private_files.write(run_dir / name, text.encode())
    except OSError as error:
        raise _unusable(run_dir, error) from None


def check(run_dir: Path) -> Path:
    """Return the run folder if nobody else can have changed it; else raise ForeignFolderError."""
    private_files.check_folder(run_dir, WHAT)
    return run_dir


def numbered(job: str, runs: Path) -> dict[int, Path]:
    """Return the folders of a job's runs below `runs`, by number."""
    folders = runs.iterdir() if runs.is_dir() else ()
    return {int(n): p for p in folders if (n := p.name.removeprefix(f"{job}-")).isdecimal()}


def _take_next(job: str, runs: Path) -> Path:
    try:
        private_files.make_folder(runs, WHAT_RUNS)
        for number in range(max(numbered(job, runs), default=0) + 1, RUNS_MAX):
            try:
                (runs / f"{job}-{number}").mkdir(private_files.FOLDER_MODE)
            except FileExistsError:
                continue  # another run has just taken it
            return runs / f"{job}-{number}"
    except OSError as error:
        raise _unusable(runs, error) from None
    raise RunDirError(runs, f"holds {RUNS_MAX} runs of {job}", hint="remove old ones")


def _take(path: Path) -> Path:
    try:
        private_files.make_folder(path, WHAT)
        # The run that creates the lock owns the folder, even if two start at once.
        os.close(private_files.create(path / LOCK))
        if {one.name for one in path.iterdir()} - {LOCK, FOLDER}:
            (path / LOCK).unlink()
            raise RunDirError(path, "is not empty", hint="name a new or an empty folder")
        path.chmod(private_files.FOLDER_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise RunDirError(path, "is a file", hint="name a new or an empty folder") from None
        raise RunDirError(
            path,
            "belongs to another run, which may still be going on",
            hint="name another folder; an old one can be removed",
        ) from None
    except OSError as error:
        raise _unusable(path, error) from None
    return path


def _unusable(path: Path, error: OSError) -> RunDirError:
    reason = (error.strerror or str(error)).lower()
    hint = "name a folder that you may write to with --run-dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or name a folder on another disk with --run-dir"
    return RunDirError(path, f"cannot be used: {reason}", hint=hint)


class Printed:
    """The file PRINTED, open for more lines. If it cannot be written, lines are dropped.

    Args:
        run_dir: The run folder.
        on_line: Called after each line.
    """

    def __init__(self, run_dir: Path, on_line: Callable[[], None]) -> None:
        self.size = 0
        """Size of the file in bytes; a reader that has read as many bytes has read all lines."""
        self._on_line = on_line
        self._fd: int | None = None
        try:
            self._fd = private_files.append(run_dir / PRINTED)
            self.size = os.fstat(self._fd).st_size
        except OSError:
            pass  # a full disk must not end the job

    def add(self, agent: str, text: str) -> None:
        """Append a line with the present time."""
        if self._fd is None:
            return
        second, fraction_ns = divmod(round(wall_s() * NS_PER_S), NS_PER_S)
        at = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{fraction_ns:09}Z"
        try:
            self.size += os.write(self._fd, f"{at} {agent} {text}\n".encode(errors="replace"))
        except OSError:
            return  # the disk is full; later lines are tried again
        self._on_line()

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LastStatusError(PacelineError):
    """Raised for a file STATUS that does not say how its run ended.

    Args:
        path: The file.
        problem: What is wrong with it.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} {problem}",
            hint=f"see the logs in {path.parent}; bring the file back, or start the job again",
            exit_code=EXIT_BAD_INPUT,
        )


def read_last_status(run_dir: Path) -> Status:
    """Return the status that a run has left when it ended.

    Args:
        run_dir: The run folder.

    Returns:
        The last status.

    Raises:
        FileNotFoundError: The run was killed, or has only just begun.
        LastStatusError: The file cannot be read, or is damaged.
    """
    path = run_dir / STATUS
    try:
        status = decode_status(read_file(path, STATUS_BYTES_MAX))
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise LastStatusError(path, f"cannot be read: {reason}") from None
    except StatusError as error:
        raise LastStatusError(path, f"is damaged: {error}") from None
    if not status.job:
        raise LastStatusError(path, "is damaged: it names no job")
    return status
