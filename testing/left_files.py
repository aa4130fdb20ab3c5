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

from paceline import scratch

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


def processes_of(folder: Path) -> list[str]:
    """Processes that work in a folder, or that have it in their environment, wherever their parents
    are. Zombies do not count."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            inside = (process / "cwd").readlink().is_relative_to(folder)
            if inside or os.fsencode(folder) in (process / "environ").read_bytes():
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words:
                    found.append(f"{process.name} {words}")
    return sorted(found)


def folders_of(folder: Path) -> list[str]:
    """Temporary folders of the runs whose TMPDIR is `folder`, and all sockets below it."""
    found = {str(path) for path in folder.rglob(f"{scratch.PREFIX}*")}
    found |= {str(path) for path in folder.rglob("*") if path.is_socket()}
    for owner in scratch.SHORT.glob(f"{scratch.PREFIX}*/{scratch.LOCK}"):
        with contextlib.suppress(OSError):
            if f"TMPDIR {folder}" in owner.read_text():
                found.add(str(owner.parent))
    return sorted(found)


def listening(*pids: int) -> set[str]:
    """TCP ports and abstract sockets that these processes listen on. Nobody else's can be left: a
    socket ends with the last process that holds it."""
    sockets = _listening_sockets()
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(fd.readlink())
                    if target in sockets:
                        found.add(f"{pid}: {sockets[target]}")
    return found


def _listening_sockets() -> dict[str, str]:
    """What /proc/PID/fd shows of a socket -> what it is."""
    found = {}
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":  # LISTEN
                    port = int(words[1].rpartition(":")[2], 16)
                    found[f"socket:[{words[9]}]"] = f"TCP port {port}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[7].startswith("@"):
            found[f"socket:[{words[6]}]"] = f"abstract socket {words[7]}"
    return found


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
