"""Shared memory and temporary files that a program left behind, kept apart from other programs'.

Other programs of the same user may run at the same time. MPI and torch put files into /dev/shm, and
MPI's process manager into /tmp, under names that do not identify the owner. A file that a process
has mapped or open is its own. So is a file whose name a rank has noted before MPI makes it.
`OwnFiles` looks for both while the processes run. Afterwards a file that still exists, and that no
process uses, was left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from paceline import scratch

PATIENCE_S = 5.0
"""Upper bound on the time between a file's creation and its first use, and between its last use and
its removal."""
PERIOD_S = 0.25
"""Interval between two looks. A rank holds the files of MPI for longer."""
LOOKS_MAX = 50
"""Number of looks at a file's holders after which it counts as another job's."""
PIDS_PERIOD_S = 1.0
"""Interval between two lists of the processes while they create no file."""
PROCESS_MANAGER = ("mpiexec", "mpiexec.hydra", "hydra_pmi_proxy")


def files() -> set[str]:
    """Return all files that exist now, of any owner."""
    return {str(p) for p in (*Path("/dev/shm").iterdir(), *Path("/tmp").glob("hydra_*"))}


class OwnFiles:
    """Collector of the files that belong to some processes during the `with` block."""

    def __init__(
        self, pids: Callable[[], Iterable[int]], tmpdir: Path, *, period_s: float = PERIOD_S
    ) -> None:
        """Ignore all files that exist already.

        Args:
            pids: returns the present processes.
            tmpdir: their TMPDIR, in which runs have their folders.
            period_s: interval between two looks, in seconds.
        """
        self.created: set[str] = set()
        self._pids, self._tmpdir, self._period_s = pids, tmpdir, period_s
        self._before = files()
        self._looks: Counter[str] = Counter()
        self._were: set[int] = set()
        """All pids so far: a process may have ended when its file is seen."""
        self._listed_s = -PIDS_PERIOD_S
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="own-files", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def _watch(self) -> None:
        while not self._over.wait(self._period_s):
            self.look()

    def look(self) -> None:
        """Add the files that the processes hold now, and torch's files that one of them made."""
        self.created |= noted(self._tmpdir) - self._before
        new = files() - self._before - self.created
        new = {name for name in new if self._looks[name] < LOOKS_MAX and _is_ours(name)}
        now_s = time.monotonic()
        if not new and now_s - self._listed_s < PIDS_PERIOD_S:
            return
        pids = set(self._pids())
        self._were, self._listed_s = self._were | pids, now_s
        if not new:
            return
        self.created |= {name for name in new if _maker(name) in self._were}
        self.created |= new & held_by(*pids)
        fresh = {name for name in new if not self._looks[name] and name.startswith("/tmp/hydra_")}
        if fresh and not _process_managers() - pids:
            self.created |= fresh  # no process has it open, and no other MPI could have made it
        self._looks.update(new)

    def left(self, patience_s: float = PATIENCE_S) -> list[str]:
        """Return the files that still exist and that no process has used for a while."""
        return left_of(self.created, patience_s)


def noted(tmpdir: Path) -> set[str]:
    """Return the files below /dev/shm that ranks of runs with this TMPDIR have noted."""
    paths = set()
    for folder in _run_folders(tmpdir):
        for note in scratch._notes(folder):
            with contextlib.suppress(OSError):
                paths |= {f"/dev/shm/{name}" for name in note.read_text().splitlines()}
    return paths


def _run_folders(tmpdir: Path) -> Iterator[Path]:
    yield from scratch._candidates(tmpdir)
    for folder in scratch._candidates(scratch.SHORT):
        with contextlib.suppress(OSError):
            if f"TMPDIR {tmpdir}\n" in (folder / scratch.LOCK).read_text():
                yield folder


def _process_managers() -> set[int]:
    """Return the pids of all running MPI programs that start ranks."""
    pids = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                if (process / "comm").read_text().strip() in PROCESS_MANAGER:
                    pids.add(int(process.name))
    return pids


def _unused(candidates: Callable[[], set[str]], patience_s: float) -> list[str]:
    until = time.monotonic() + patience_s
    while existing := candidates():
        left = existing - _used()
        if not left or time.monotonic() > until:
            return sorted(left)
        time.sleep(0.1)
    return []


def held_by(*pids: int) -> set[str]:
    """Return those of `files()` that these processes have mapped or open."""
    held = {name for pid in pids for name in _used_by(Path(f"/proc/{pid}"))}
    return held & files()


def left_of(held: set[str], patience_s: float = PATIENCE_S) -> list[str]:
    """Return those of `held` that still exist and that no process has used for a while."""
    return _unused(lambda: held & files(), patience_s)


def processes_of(folder: Path) -> list[str]:
    """Return the processes that work in a folder or have it in their environment.

    Their parents do not matter. Zombies do not count.

    Args:
        folder: the folder.

    Returns:
        pid and command line of each.
    """
    processes = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            inside = (process / "cwd").readlink().is_relative_to(folder)
            if inside or os.fsencode(folder) in (process / "environ").read_bytes():
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words:
                    processes.append(f"{process.name} {words}")
    return sorted(processes)


def folders_of(folder: Path) -> list[str]:
    """Return temporary folders of the runs whose TMPDIR is `folder`, and all sockets below it."""
    folders = {str(path) for path in folder.rglob(f"{scratch.PREFIX}*")}
    folders |= {str(path) for path in folder.rglob("*") if path.is_socket()}
    for owner in scratch.SHORT.glob(f"{scratch.PREFIX}*/{scratch.LOCK}"):
        with contextlib.suppress(OSError):
            if f"TMPDIR {folder}" in owner.read_text():
                folders.add(str(owner.parent))
    return sorted(folders)


def listening(*pids: int) -> set[str]:
    """Return the TCP ports and abstract sockets that these processes listen on.

    No other process can have left one: a socket ends with the last process that holds it.

    Args:
        pids: the processes.

    Returns:
        pid and socket of each, as text.
    """
    sockets = _listening_sockets()
    held: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(fd.readlink())
                    if target in sockets:
                        held.add(f"{pid}: {sockets[target]}")
    return held


def _listening_sockets() -> dict[str, str]:
    """Return the link target in /proc/PID/fd -> description of each listening socket."""
    sockets = {}
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":  # LISTEN
                    port = int(words[1].rpartition(":")[2], 16)
                    sockets[f"socket:[{words[9]}]"] = f"TCP port {port}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[7].startswith("@"):
            sockets[f"socket:[{words[6]}]"] = f"abstract socket {words[7]}"
    return sockets


def memory_of(*pids: int) -> list[str]:
    """Return the unnamed shared memory for sums that these processes have open or mapped."""
    names: set[str] = set()
    for pid in pids:
        names |= {f"{pid}: {name}" for name in _used_by(Path(f"/proc/{pid}")) if _is_memory(name)}
    return sorted(names)


def _maker(name: str) -> int | None:
    """Return the pid in a name that torch has made below /dev/shm, or None.

    No process may have such a file open if its maker was killed between creating and removing it.

    Args:
        name: path of the file.

    Returns:
        the maker's pid.
    """
    of_torch = re.fullmatch(r"/dev/shm/torch_(\d+)_\d+_\d+", name)
    return int(of_torch[1]) if of_torch else None


def _is_memory(name: str) -> bool:
    return name.startswith("/memfd:paceline (")


def _is_ours(name: str) -> bool:
    try:
        return Path(name).stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _used() -> set[str]:
    """Return what is mapped or open in any process that this user may inspect."""
    processes = (p for p in Path("/proc").iterdir() if p.name.isdecimal())
    return {name for process in processes for name in _used_by(process)}


def _used_by(process: Path) -> set[str]:
    paths: set[str] = set()
    # The process may just have ended, or closed a file.
    with contextlib.suppress(OSError):
        # The path is the sixth field, and may contain spaces.
        for line in (process / "maps").read_text().splitlines():
            paths.add(line.split(maxsplit=5)[-1])
        paths.update(os.readlink(fd) for fd in (process / "fd").iterdir())  # noqa: PTH115
    return paths
