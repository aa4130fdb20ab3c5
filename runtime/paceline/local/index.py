"""Which jobs this user is running on this machine, for `paceline status` and `paceline scale`.

A running job leaves a note in a folder of the user and one in its run folder; both name the socket
that its runner listens on (`local.control`). A note whose socket nobody listens on any more is of a
runner that was killed: it is removed by whoever finds it, and counts for nothing.
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
"""In the run folder."""
CONNECT_S: Final = 2.0
NOTE_BYTES_MAX: Final = 64 * 1024
PID_MAX: Final = 2**22
"""Largest process id of Linux."""
PathText = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00]*\Z")]
"""A path that the kernel takes."""
WHAT: Final = "folder of notes about running jobs"


class Entry(msgspec.Struct, frozen=True):
    job: str
    run_dir: PathText
    socket: PathText
    pid: Annotated[int, msgspec.Meta(ge=1, le=PID_MAX)]
    """Of the runner."""


def folders(env: Mapping[str, str]) -> list[Path]:
    """Where notes may be, the place for new ones first. Terminals of one user may differ in
    XDG_RUNTIME_DIR, so a reader looks into all."""
    found = []
    if runtime := env.get("XDG_RUNTIME_DIR"):
        found.append(Path(runtime) / "paceline")
    if state := env.get("XDG_STATE_HOME"):
        found.append(Path(state) / "paceline")
    if home := env.get("HOME"):
        found.append(Path(home) / ".local" / "state" / "paceline")
    return found


def publish(entry: Entry, env: Mapping[str, str]) -> list[Path]:
    """Leave the notes; returns their paths. OSError if no folder of the user can be written to:
    then only the run folder has one."""
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
    for note in notes:
        note.unlink(missing_ok=True)


def running(env: Mapping[str, str]) -> list[Entry]:
    """The jobs whose runner listens, by name and run folder."""
    found: dict[str, Entry] = {}
    for folder in folders(env):
        if not private_files.is_private(folder):
            continue  # nobody else tells which socket to ask and which folder to remove
        for note in folder.glob("*.json"):
            entry = _read(note)
            if entry is not None and listens(entry):
                found[entry.run_dir] = entry
            elif entry is not None:
                remove([note])
    return sorted(found.values(), key=lambda entry: (entry.job, entry.run_dir))


def of_run_dir(run_dir: Path) -> Entry | None:
    """The job that runs in this folder; None if none does."""
    entry = _read(run_dir / NOTE)
    return entry if entry is not None and listens(entry) else None


def listens(entry: Entry) -> bool:
    """False if the runner is gone. A stopped one still counts: its kernel takes the connection."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(CONNECT_S)
        try:
            line.connect(entry.socket)
        except TimeoutError:
            return True
        except OSError:
            return False
        return credentials_of(line).uid == os.geteuid()


def _read(note: Path) -> Entry | None:
    try:
        return msgspec.json.decode(read_file(note, NOTE_BYTES_MAX), type=Entry)
    except (OSError, *UNDECODABLE):
        return None
