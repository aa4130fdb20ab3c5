"""Shared memory and temporary files that a program left behind, told from those of programs that
run at the same time: tests run side by side, and beside whatever else the machine does.

MPI and torch put files into /dev/shm, and MPI's process manager into /tmp, under names that do not
tell whose they are. But a file that is in use is mapped or open somewhere; one that was left is
not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 5.0
"""Between a file's making and its first use, and between the last use and its end."""


def files() -> set[str]:
    """All there are now, of anybody."""
    return {str(p) for p in (*Path("/dev/shm").iterdir(), *Path("/tmp").glob("hydra_*"))}


def left_since(before: set[str], patience_s: float = PATIENCE_S) -> list[str]:
    """Made since `before` was `files()`, still there, and in use by nobody for a while."""
    return _unused(lambda: {name for name in files() - before if _is_ours(name)}, patience_s)


def _unused(candidates: Callable[[], set[str]], patience_s: float) -> list[str]:
    until = time.monotonic() + patience_s
    while found := candidates():
        left = found - _used()
        if not left or time.monotonic() > until:
            return sorted(left)
        time.sleep(0.1)
    return []


def held_by(*pids: int) -> set[str]:
    """What these processes have mapped or open of `files()`: theirs, whoever runs beside them."""
    held = {name for pid in pids for name in _used_by(Path(f"/proc/{pid}"))}
    return held & files()


def left_of(held: set[str], patience_s: float = PATIENCE_S) -> list[str]:
    """Those of `held_by` that are still there, and in use by nobody for a while. Files of another
    job of this machine are never among them."""
    return _unused(lambda: held & files(), patience_s)


def memory_of(*pids: int) -> list[str]:
    """Shared memory without a name, which sums are made in, that these processes hold, open or
    mapped. What no process holds is gone."""
    found: set[str] = set()
    for pid in pids:
        found |= {f"{pid}: {name}" for name in _used_by(Path(f"/proc/{pid}")) if _is_memory(name)}
    return sorted(found)


def _is_memory(name: str) -> bool:
    return name.startswith("/memfd:paceline (")


def _is_ours(name: str) -> bool:
    try:
        return Path(name).stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _used() -> set[str]:
    """Mapped or open in a process that we may look into; ours all are."""
    processes = (p for p in Path("/proc").iterdir() if p.name.isdecimal())
    return {name for process in processes for name in _used_by(process)}


def _used_by(process: Path) -> set[str]:
    found: set[str] = set()
    # It may just have ended, or closed a file.
    with contextlib.suppress(OSError):
        # The path is the sixth word, and may have spaces.
        for line in (process / "maps").read_text().splitlines():
            found.add(line.split(maxsplit=5)[-1])
        found.update(os.readlink(fd) for fd in (process / "fd").iterdir())  # noqa: PTH115
    return found
