"""Shared memory and temporary files that a program left behind, told from those of programs that
run at the same time, of this user too.

MPI and torch put files into /dev/shm, and MPI's process manager into /tmp, under names that do not
tell whose they are. What a process has mapped or open is its own; what a rank has noted before MPI
makes it is its own as well. `OwnFiles` looks for both while the processes run. Afterwards a file
that is still there, and in use by nobody, was left.
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
"""Between a file's making and its first use, and between the last use and its end."""
PERIOD_S = 0.1
"""From one look to the next. A rank holds the files of MPI for longer."""
LOOKS_MAX = 50
"""Looks at who holds a file before it counts as another job's."""
PIDS_PERIOD_S = 1.0
"""From one list of the processes to the next while they make no file."""
PROCESS_MANAGER = ("mpiexec", "mpiexec.hydra", "hydra_pmi_proxy")


def files() -> set[str]:
    """All there are now, of anybody."""
    return {str(p) for p in (*Path("/dev/shm").iterdir(), *Path("/tmp").glob("hydra_*"))}


class OwnFiles:
    """Learns which files belong to some processes, as long as the `with` block lasts."""

    def __init__(
        self, pids: Callable[[], Iterable[int]], tmpdir: Path, *, period_s: float = PERIOD_S
    ) -> None:
        """Look at no file that is there already.

        Args:
            pids: Returns the processes as they are now.
            tmpdir: Their TMPDIR, in which runs have their folders.
            period_s: From one look to the next.
        """
        self.found: set[str] = set()
        self._pids, self._tmpdir, self._period_s = pids, tmpdir, period_s
        self._before = files()
        self._looks: Counter[str] = Counter()
        self._were: set[int] = set()
        """All pids so far: a process may be gone when its file is seen."""
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
        """Add what belongs to the processes now, and names of torch whose maker was one of them."""
        self.found |= noted(self._tmpdir) - self._before
        new = files() - self._before - self.found
        new = {name for name in new if self._looks[name] < LOOKS_MAX and _is_ours(name)}
        now_s = time.monotonic()
        if not new and now_s - self._listed_s < PIDS_PERIOD_S:
            return
        pids = set(self._pids())
        self._were, self._listed_s = self._were | pids, now_s
        if not new:
            return
        self.found |= {name for name in new if _maker(name) in self._were}
        self.found |= new & held_by(*pids)
        fresh = {name for name in new if not self._looks[name] and name.startswith("/tmp/hydra_")}
        if fresh and not _process_managers() - pids:
            self.found |= fresh  # nobody has it open, and nobody else can have made it
        self._looks.update(new)

    def left(self, patience_s: float = PATIENCE_S) -> list[str]:
        """Return those that are still there, and in use by nobody for a while."""
        return left_of(self.found, patience_s)


def noted(tmpdir: Path) -> set[str]:
    """Return the files below /dev/shm that ranks of runs with this TMPDIR have noted."""
    found = set()
    for folder in _run_folders(tmpdir):
        for note in scratch._notes(folder):
            with contextlib.suppress(OSError):
                found |= {f"/dev/shm/{name}" for name in note.read_text().splitlines()}
    return found


def _run_folders(tmpdir: Path) -> Iterator[Path]:
    yield from scratch._candidates(tmpdir)
    for folder in scratch._candidates(scratch.SHORT):
        with contextlib.suppress(OSError):
            if f"TMPDIR {tmpdir}\n" in (folder / scratch.LOCK).read_text():
                yield folder


def _process_managers() -> set[int]:
    """Pids of all running programs of MPI that start ranks."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                if (process / "comm").read_text().strip() in PROCESS_MANAGER:
                    found.add(int(process.name))
    return found


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


def _maker(name: str) -> int | None:
    """Return the pid in a name that torch has made below /dev/shm: it may be left while nobody has
    it open, by a process that was killed between making and removing it."""
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
