"""Shared memory and temporary files that a program left behind, told from those of programs that
run at the same time: tests run side by side, and beside whatever else the machine does.

MPI and torch put files into /dev/shm, and MPI's process manager into /tmp, under names that do not
tell whose they are. But a file that is in use is mapped or open somewhere; one that was left is
not.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PATIENCE_S = 5.0
"""Between a file's making and its first use, and between the last use and its end."""


def files() -> set[str]:
    """All there are now, of anybody."""
    return {str(p) for p in (*Path("/dev/shm").iterdir(), *Path("/tmp").glob("hydra_*"))}


def left_since(before: set[str], patience_s: float = PATIENCE_S) -> list[str]:
    """Made since `before` was `files()`, still there, and in use by nobody for a while."""
    until = time.monotonic() + patience_s
    while new := {name for name in files() - before if _is_ours(name)}:
        left = new - _used()
        if not left or time.monotonic() > until:
            return sorted(left)
        time.sleep(0.1)
    return []


def _is_ours(name: str) -> bool:
    try:
        return Path(name).stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _used() -> set[str]:
    """Mapped or open in a process that we may look into; ours all are."""
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            # The path is the sixth word, and may have spaces.
            for line in (process / "maps").read_text().splitlines():
                found.add(line.split(maxsplit=5)[-1])
            found.update(os.readlink(fd) for fd in (process / "fd").iterdir())  # noqa: PTH115
        except OSError:
            continue  # it has just ended, or closed a file
    return found
