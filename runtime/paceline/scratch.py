"""Temporary folders with an owner: sockets, TMPDIR of the ranks, and what has to be removed later.

A local run has one folder in the temporary folder, each agent has one inside that (in a pod: in the
pod's temporary folder), and each rank has one inside its agent's. The owner removes its folder. It
holds a lock on a file in it, which the kernel releases however the owner ends. So a folder whose
lock is free was left by an owner that was killed, and `sweep()` removes it: the runner does so
after the death of an agent, an agent at its start and after the death of its runner, and a new run
at its start. A living owner's folder is never touched.

The path of a socket is short (108 bytes on Linux). If the temporary folder's path leaves no room,
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
"""Of the name of each folder that has an owner."""
LOCK: Final = "owner"
"""File in such a folder; its owner holds a lock on it."""
SHARED_MEMORY: Final = "shared-memory"
"""File in a rank's folder: names below /dev/shm that are removed together with the folder."""
TMPDIR: Final = "tmp"
"""Folder in a rank's folder."""
SHORT: Final = Path("/tmp")
SHM: Final = Path("/dev/shm")
SUN_PATH_MAX: Final = 100
"""Bytes of a socket's path; a few less than any kernel takes."""
BELOW_MAX: Final = len("/paceline-run-12345678") * 2 + len("/9999.99-9999999-99/r.f")
"""Bytes of a rank's socket below the temporary folder of its run."""
TRIES: Final = 100
NOTES_DEPTH: Final = 2
"""From the folder of a run over that of an agent to that of a rank."""
CLEANERS_S: Final = 4.0
"""For programs that remove the shared memory of dead processes. torch's ends after 2 s."""
_MPICH: Final = re.compile(r"mpich_shm_[0-9a-f]+_[0-9]+")
COMMAND_LINE_MAX: Final = 4096
"""Bytes of a process's command line that are looked at."""
_CLEANERS: Final = re.compile(
    rb"(?:\A|/)torch_shm_manager\0|\0-c\0from [\w.]*resource_tracker import main; ?main\("
)


class Scratch:
    """The folder, or both folders, that this process owns. Not thread-safe."""

    def __init__(self, temporary: _Owned, sockets: _Owned) -> None:
        self.temporary = temporary.path
        """Where temporary files go."""
        self.sockets = sockets.path
        """Where sockets go; often the same folder."""
        self._owned = {temporary.path: temporary, sockets.path: sockets}

    @classmethod
    def make(cls, spare: Path | None = None) -> Self:
        """Make the folder in TMPDIR.

        Args:
            spare: Used if no temporary folder can be written to.

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
        """Remove the folders with all that is in them. May be called again."""
        for owned in self._owned.values():
            owned.remove()
        self._owned.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Owned:
    """One folder with the lock on it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def make(cls, base: Path, whose: Path | None = None) -> Self:
        """Raises OSError."""
        text = f"pid {os.getpid()}, TMPDIR {whose or base}\n"
        for _ in range(TRIES):
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            try:
                lock = _lock(path)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    shutil.rmtree(path, ignore_errors=True)
                    raise
                # No locks on this file system: the folder counts as owned for ever.
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if lock is not None:
                (path / LOCK).write_text(text)  # for people; it is the lock that counts
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
    """Remove the folders directly below `where` that this user's killed processes have left."""
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
    """Yield the notes in the folder of a rank, an agent or a run while others may remove parts."""
    for inside, folders, files in os.walk(folder):  # skips what vanishes, as glob() does not
        if SHARED_MEMORY in files:
            yield Path(inside, SHARED_MEMORY)
        if len(Path(inside).relative_to(folder).parts) >= NOTES_DEPTH:
            folders.clear()


def note_shared_memory(folder: Path, name: str) -> None:
    """Have a name below /dev/shm removed together with `folder`. Call it before the name exists."""
    with contextlib.suppress(OSError), (folder / SHARED_MEMORY).open("a") as file:
        file.write(f"{name}\n")


def remove_torch_memory(pid: int) -> None:
    """Remove the empty files of torch in /dev/shm that a dead process has left.

    torch makes a file there and unlinks it at once; a process that is killed in between leaves it,
    and only the pid in its name tells whose it was. Call it before the process is reaped: until
    then nobody else can have its pid. A file with content stays: it may belong to a process of
    another container that shares /dev/shm.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(SHM):  # noqa: PTH208  # a generator breaks when an entry vanishes
            if name.startswith(f"torch_{pid}_"):
                with contextlib.suppress(OSError):
                    about = (SHM / name).lstat()
                    if about.st_uid == os.getuid() and about.st_blocks == 0:
                        (SHM / name).unlink()


def cleans_up(pid: int) -> bool:
    """Return True if a process removes the shared memory of others when they have ended.

    Python's resource tracker (semaphores and `SharedMemory` of multiprocessing; joblib has its own)
    and torch's manager of the sharing strategy `file_system` know the names, which tell nobody
    else whose they are. Both end by themselves after the processes that they serve, so whoever
    kills these lets them, for CLEANERS_S at most.
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
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(base):  # noqa: PTH208  # a generator breaks when an entry vanishes
            if not name.startswith(PREFIX):
                continue
            with contextlib.suppress(FileNotFoundError):
                about = (base / name).lstat()
                if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                    found.append(base / name)
    return found


def _sweep_one(path: Path) -> bool:
    """Whether it is gone. What is left inside a living owner's folder goes, too."""
    swept = [_sweep_one(inner) for inner in _candidates(path)]
    if not all(swept):
        return False  # an owner that lives keeps the folders around its own
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
    """Take the folder's lock; returns its descriptor, or None if the folder or lock was taken away.

    Raises OSError: BlockingIOError if a living process holds it.
    """
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who held it until now may have removed the file.
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
                # Of another user, it stays: /dev/shm is sticky.
                (SHM / name).unlink(missing_ok=True)
