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
from typing import Final

import msgspec
from paceline_api.decoding import UNDECODABLE

NOTE: Final = "control.json"
"""In the run folder."""
CONNECT_S: Final = 2.0


class Entry(msgspec.Struct, frozen=True):
    job: str
    run_dir: str
    socket: str
    pid: int
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
    _write(note, data)
    error: OSError = FileNotFoundError("neither XDG_RUNTIME_DIR nor HOME is set")
    for folder in folders(env):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            in_folder = folder / f"{entry.job}-{entry.pid}.json"
            _write(in_folder, data)
        except OSError as problem:
            error = problem
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
        if not folder.is_dir():
            continue
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
    return True


def _read(note: Path) -> Entry | None:
    try:
        return msgspec.json.decode(note.read_bytes(), type=Entry)
    except (OSError, *UNDECODABLE):
        return None


def _write(note: Path, data: bytes) -> None:
    """Whole or not at all, for this user only."""
    draft = note.with_suffix(f".{os.getpid()}.tmp")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123
        file.write(data)
    draft.replace(note)
