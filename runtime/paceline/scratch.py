"""Temporary folders with an owner: sockets, TMPDIR of the ranks, and notes of what to remove later.

A local run has one folder in the temporary folder. Each agent has one inside that (in a pod: in the
pod's temporary folder), and each rank has one inside its agent's. The owner removes its folder. It
holds a lock on a file in it, which the kernel releases however the owner ends. So a folder whose
lock is free was left by an owner that was killed, and `sweep()` removes it. The runner sweeps after
the death of an agent, an agent at its start and after the death of its runner, and a new run at its
start. The folder of a living owner is never touched.

The path of a socket is limited to 108 bytes on Linux. If the temporary folder's path is too long,
there is a second folder for the sockets in /tmp, under the same rules.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Self

from paceline_api.errors import PacelineError

PREFIX: Final = "paceline-run-"
"""Prefix of the name of each folder that has an owner."""
LOCK: Final = "owner"
"""File in such a folder on which its owner holds a lock."""
SHARED_MEMORY: Final = "shared-memory"
"""File in a rank's folder with names below /dev/shm that are removed together with the folder."""
TMPDIR: Final = "tmp"
"""Folder in a rank's folder for its temporary files."""
SHORT: Final = Path("/tmp")
SHM: Final = Path("/dev/shm")
SUN_PATH_MAX: Final = 100
"""Length limit of a socket's path in bytes, a few less than any kernel accepts."""
BELOW_MAX: Final = len("/paceline-run-12345678") * 2 + len("/9999.99-9999999-99/r.f")
"""Bytes that the path of a rank's socket adds to the temporary folder of its run."""
TRIES: Final = 100
NOTES_DEPTH: Final = 2
"""Levels from the folder of a run, over that of an agent, to that of a rank."""
CLEANERS_S: Final = 4.0
"""Seconds for programs that remove the shared memory of dead processes. That of torch ends after 2
s."""
_MPICH: Final = re.compile(r"mpich_shm_[0-9a-f]+_[0-9]+")
COMMAND_LINE_MAX: Final = 4096
"""Bytes of a process's command line that are examined."""
_CLEANERS: Final = re.compile(
    rb"(?:\A|/)torch_shm_manager\0|\0-c\0from [\w.]*resource_tracker import main; ?main\("
)


class Scratch:
    """The one or two folders that this process owns. Not thread-safe."""

    def __init__(self, temporary: _Owned, sockets: _Owned) -> None:
        self.temporary = temporary.path
        """Folder for temporary files."""
        self.sockets = sockets.path
        """Folder for sockets. Often the same folder."""
        self._owned = {temporary.path: temporary, sockets.path: sockets}

    @classmethod
    def make(cls, spare: Path | None = None) -> Self:
        """Make the folders in TMPDIR and lock them.

        Args:
            spare: Used if no temporary folder can be written to.

        Returns:
            The folders of this process.

        Raises:
            PacelineError: No folder can be made.
        """
        try:
            base = _base(spare)
            temporary = _Owned.make(base)
            sockets = temporary if has_room(base) else _Owned.make(SHORT, whose=base)
        except OSError as error:
            raise PacelineError(
                f"no temporary folder can be made in {error.filename or tempfile.gettempdir()}: "
                f"{(error.strerror or str(error)).lower()}",
                hint="set TMPDIR to a folder that exists, may be written to and has free space",
            ) from None
        return cls(temporary, sockets)

    def close(self) -> None:
        """Remove the folders with all that is in them. Idempotent."""
        for owned in self._owned.values():
            owned.remove()
        self._owned.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Owned:
    """One folder with its lock."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def make(cls, base: Path, whose: Path | None = None) -> Self:
        """Make a folder below `base` and lock it. Raise OSError if that fails."""
        text = f"pid {os.getpid()}, TMPDIR {whose or base}\n"
        for _ in range(TRIES):
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            try:
                lock = _lock(path)
            except BlockingIOError:
                continue  # somebody who sweeps holds the lock, and removes the folder
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    shutil.rmtree(path, ignore_errors=True)
                    raise
                # No locks on this file system: the folder counts as owned for ever.
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if lock is not None:
                (path / LOCK).write_text(text)  # for people; only the lock counts
                return cls(path, lock)
            # Somebody swept it before it was locked.
        raise FileExistsError(errno.EEXIST, "folders are removed as soon as they are made", base)

    def remove(self) -> None:
        remove([self.path])
        os.close(self._lock)


def has_room(base: str | Path) -> bool:
    """Return True if the paths of the ranks' sockets fit below a temporary folder."""
    return len(os.fsencode(base)) + BELOW_MAX <= SUN_PATH_MAX


def bases() -> list[Path]:
    """Return the folders in which processes with this TMPDIR make theirs."""
    with contextlib.suppress(OSError):
        return list(dict.fromkeys((Path(tempfile.gettempdir()), SHORT)))
    return [SHORT]


def sweep(where: Iterable[Path]) -> None:
    """Remove folders directly below `where` that killed processes of this user have left."""
    for base in where:
        for path in _candidates(base):
            _sweep_one(path)


def remove(folders: Iterable[Path]) -> None:
    """Remove folders with all that is in them, and the shared memory that they name."""
    for folder in folders:
        for note in _notes(folder):
            _unlink_shared_memory(note)
        shutil.rmtree(folder, ignore_errors=True)


def _notes(folder: Path) -> Iterator[Path]:
    """Yield the notes in the folder of a rank, an agent or a run.

    Others may remove parts meanwhile.
    """
    for inside, folders, files in os.walk(folder):  # unlike glob(), it skips what vanishes
        if SHARED_MEMORY in files:
            yield Path(inside, SHARED_MEMORY)
        if len(Path(inside).relative_to(folder).parts) >= NOTES_DEPTH:
            folders.clear()


def note_shared_memory(folder: Path, name: str) -> None:
    """Note a name below /dev/shm to remove with `folder`. Call it before the name exists."""
    with contextlib.suppress(OSError), (folder / SHARED_MEMORY).open("a") as file:
        file.write(f"{name}\n")


def remove_torch_memory(pid: int) -> None:
    """Remove the empty files of torch in /dev/shm that a dead process has left.

    torch makes a file there and unlinks it at once. A process that is killed in between leaves it,
    and only the pid in the file's name shows whose it was. Call this before the process is reaped:
    until then no other process can have its pid. A file with content stays, since it may belong to
    a process of another container that shares /dev/shm.

    Args:
        pid: Pid of the dead process.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(SHM):  # noqa: PTH208  # a generator breaks when an entry vanishes
            if name.startswith(f"torch_{pid}_"):
                with contextlib.suppress(OSError):
                    about = (SHM / name).lstat()
                    if about.st_uid == os.getuid() and about.st_blocks == 0:
                        (SHM / name).unlink()


def cleans_up(pid: int) -> bool:
    """Return True if a process removes the shared memory of others after they have ended.

    Python's resource tracker (semaphores and `SharedMemory` of multiprocessing; joblib has its own)
    and torch's manager of the sharing strategy `file_system` know the names of the memory. Others
    cannot tell from a name whose it is. Both end by themselves after the processes that they serve.
    So a process that kills these has to let them end by themselves, for CLEANERS_S at most.

    Args:
        pid: Pid of the process.

    Returns:
        False if it does something else or has ended.
    """
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/cmdline").open("rb") as file:
        return _CLEANERS.search(file.read(COMMAND_LINE_MAX)) is not None
    return False


def _base(spare: Path | None) -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        if spare is None:
            raise
        return spare


def _candidates(base: Path) -> list[Path]:
    folders = []
    with contextlib.suppress(OSError):
        for name in os.listdir(base):  # noqa: PTH208  # a generator breaks when an entry vanishes
            if not name.startswith(PREFIX):
                continue
            with contextlib.suppress(FileNotFoundError):
                about = (base / name).lstat()
                if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                    folders.append(base / name)
    return folders


def _sweep_one(path: Path) -> bool:
    """Return True if the folder is gone. Sweep inside the folder of a living owner, too."""
    swept = [_sweep_one(inner) for inner in _candidates(path)]
    if not all(swept):
        return False  # a living owner keeps the folders around its own
    try:
        lock = _lock(path)
    except OSError:
        return False
    if lock is None:
        return not path.exists()
    remove([path])
    os.close(lock)
    return True


def _lock(path: Path) -> int | None:
    """Take the lock of a folder.

    Args:
        path: The folder.

    Returns:
        The descriptor that holds the lock, or None if somebody removed the folder or the lock file
        meanwhile.

    Raises:
        OSError: The lock cannot be taken. BlockingIOError: a living process holds it.
    """
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have removed the file.
        if os.path.samestat(os.fstat(lock), (path / LOCK).stat()):
            return lock
    except FileNotFoundError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _unlink_shared_memory(note: Path) -> None:
    with contextlib.suppress(OSError):
        for name in note.read_text().splitlines():
            if _MPICH.fullmatch(name):
                # Another user's file stays, since /dev/shm is sticky.
                (SHM / name).unlink(missing_ok=True)
