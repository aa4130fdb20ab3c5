"""Index of the jobs that this user runs on this machine, for `paceline status` and others.

A running job leaves one note in a folder of the user and one in its run folder. Both name the
socket that its runner listens on (`local.control`). If nobody listens on that socket any more, the
runner was killed: its notes are ignored, and `running` removes them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE

from paceline import private_files
from paceline.peer_credentials import credentials_of
from paceline.private_files import ForeignFolderError

NOTE: Final = "control.json"
"""Name of the note in the run folder."""
CONNECT_S: Final = 2.0
"""How long a connection to a runner may take, in seconds."""
NOTE_BYTES_MAX: Final = 64 * 1024
PID_MAX: Final = 2**22
"""Largest process id of Linux."""
PathText = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00]*\Z")]
"""Path that the kernel accepts: without zero bytes."""
WHAT: Final = "folder of notes about running jobs"
"""Name of the folder in error messages."""


class RunEntry(msgspec.Struct, frozen=True):
    """Note about a running job."""

    job: str
    run_dir: PathText
    socket: PathText
    pid: Annotated[int, msgspec.Meta(ge=1, le=PID_MAX)]
    """Process id of the runner."""


def folders(env: Mapping[str, str]) -> list[Path]:
    """Return the folders that may hold notes, the one for new notes first.

    Terminals of one user may differ in XDG_RUNTIME_DIR, so a reader looks into all of them.

    Returns:
        Folders that may not exist.
    """
    paths = []
    if runtime := env.get("XDG_RUNTIME_DIR"):
        paths.append(Path(runtime) / "paceline")
    if state := env.get("XDG_STATE_HOME"):
        paths.append(Path(state) / "paceline")
    if home := env.get("HOME"):
        paths.append(Path(home) / ".local" / "state" / "paceline")
    return paths


def publish(entry: RunEntry, env: Mapping[str, str]) -> list[Path]:
    """Write the notes of a running job.

    If no folder of the user can be written to, an OSError is raised. The run folder then has a
    note.

    Args:
        entry: The note.
        env: Environment that names the user's folders.

    Returns:
        The paths of the notes.
    """
    data = msgspec.json.encode(entry)
    note = Path(entry.run_dir) / NOTE
    private_files.write(note, data)
    error: OSError = FileNotFoundError("neither XDG_RUNTIME_DIR nor HOME is set")
    for folder in folders(env):
        try:
            private_files.make_folder(folder, WHAT)
            in_folder = folder / f"{entry.job}-{entry.pid}.json"
            private_files.write(in_folder, data)
        except OSError as problem:
            error = problem
            continue
        except ForeignFolderError as problem:
            error = PermissionError(f"{problem.message}; {problem.hint}")
            continue
        return [note, in_folder]
    raise error


def remove(notes: list[Path]) -> None:
    """Remove these notes; missing ones are ignored."""
    for note in notes:
        note.unlink(missing_ok=True)


def running(env: Mapping[str, str]) -> list[RunEntry]:
    """Return the jobs whose runner listens, sorted by name and run folder.

    Notes of runners that were killed are removed. Folders that another user can write to are
    ignored.

    Returns:
        One entry for each job.
    """
    entries: dict[str, RunEntry] = {}
    for folder in folders(env):
        if not private_files.is_private(folder):
            continue  # a note of another user could name any socket or folder
        for note in folder.glob("*.json"):
            entry = _read(note)
            if entry is not None and listens(entry):
                entries[entry.run_dir] = entry
            elif entry is not None:
                remove([note])
    return sorted(entries.values(), key=lambda entry: (entry.job, entry.run_dir))


def of_run_dir(run_dir: Path) -> RunEntry | None:
    """Return the entry of the job that runs in this folder; None if there is none."""
    entry = _read(run_dir / NOTE)
    return entry if entry is not None and listens(entry) else None


def listens(entry: RunEntry) -> bool:
    """Return True if the runner is alive.

    A stopped runner counts as alive, because the kernel accepts the connection for it.

    Returns:
        False also if another user listens on the socket.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(CONNECT_S)
        try:
            line.connect(entry.socket)
        except TimeoutError:
            return True
        except OSError:
            return False
        return credentials_of(line).uid == os.geteuid()


def _read(note: Path) -> RunEntry | None:
    try:
        return msgspec.json.decode(read_file(note, NOTE_BYTES_MAX), type=RunEntry)
    except (OSError, *UNDECODABLE):
        return None
