"""Files and folders of one user on a machine that others use too.

Files of a run may hold secrets (the environment of a job, output of scripts, weights), so only the
run's user may read them. A user who can change a run folder decides what the next command of its
owner runs. So a folder that somebody else owns or may write to is refused before anything in it is
trusted.

The checks are for folders of this machine. In a pod, folders come from volumes, whose owners and
modes are the cluster's responsibility.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, printable

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
UMASK: Final = 0o077
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class ForeignFolderError(PacelineError):
    """Raised for a folder that somebody else owns or may write to."""

    def __init__(self, path: Path, what: str, problem: str, *, hint: str) -> None:
        super().__init__(
            f"{what} {printable(str(path))} {problem}", hint=hint, exit_code=EXIT_BAD_INPUT
        )


@contextlib.contextmanager
def private_umask() -> Iterator[int]:
    """Make files that the block creates private to this user.

    Yields:
        The umask from before the block.
    """
    before = os.umask(UMASK)
    try:
        yield before
    finally:
        os.umask(before)


def make_folder(path: Path, what: str) -> None:
    """Make a folder for this user alone, with its parents, or check an existing one.

    It raises ForeignFolderError if somebody else owns the folder or may write to it.

    Args:
        path: The folder. If it exists, its mode stays unchanged.
        what: Name of the folder in error messages, such as `run folder`.

    Raises:
        FileExistsError: Something else has this name.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(FOLDER_MODE, parents=True)
        return
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    check_folder(path, what)


def check_folder(path: Path, what: str) -> None:
    """Check that only this user can change the contents of a folder.

    It raises OSError if there is no such folder.

    Args:
        path: The folder, or a symbolic link of this user to it.
        what: Name of the folder in error messages, such as `run folder`.

    Raises:
        ForeignFolderError: Somebody else can. The message names owner and mode.
    """
    link = path.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid != os.geteuid():
        raise ForeignFolderError(
            path,
            what,
            f"is a symbolic link of {_user(link.st_uid)}, and you are {_user(os.geteuid())}",
            hint="name a folder that is yours",
        )
    about = path.stat()
    mode = stat.S_IMODE(about.st_mode)
    if about.st_uid != os.geteuid():
        raise ForeignFolderError(
            path,
            what,
            f"belongs to {_user(about.st_uid)} (mode {mode:04o}), and you are "
            f"{_user(os.geteuid())}",
            hint="name a folder that is yours, or work as its owner",
        )
    if writers := " and ".join(_writers(mode, about.st_gid)):
        raise ForeignFolderError(
            path,
            what,
            f"may be written to by {writers} (owner {_user(about.st_uid)}, mode {mode:04o})",
            hint=f"see that nobody has changed what is in it, then chmod go-w {path}",
        )


def is_private(path: Path) -> bool:
    """Return True if the folder exists and nobody but this user can change its contents."""
    try:
        check_folder(path, "")
    except (OSError, ForeignFolderError):
        return False
    return path.is_dir()


def create(path: Path, mode: int = FILE_MODE) -> int:
    """Make a new file and return a descriptor for writing. Raise FileExistsError if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


def append(path: Path, mode: int = FILE_MODE) -> int:
    """Open a file, new or not, to write at its end. Return its descriptor. Follow no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


def write(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Put a file in place, whole or not at all. A link of that name is replaced, not followed.

    Args:
        path: The file.
        data: Its content.
        mode: Its mode, reduced by the umask.

    Raises:
        OSError: It cannot be written. The old file stays.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(create(draft, mode), "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _writers(mode: int, gid: int) -> list[str]:
    """Return who may write beside the owner, as text."""
    writers = []
    if mode & stat.S_IWGRP and not _is_own_group(gid):
        writers.append(f"the group {_group(gid)}")
    if mode & stat.S_IWOTH:
        writers.append("everybody")
    return writers


def _is_own_group(gid: int) -> bool:
    """Return True for the private group of this user.

    Debian and Fedora give each user one. There the usual umask is 002, and the user's group may
    write to every folder.

    Args:
        gid: Id of the group.

    Returns:
        True if nobody else is in it.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
