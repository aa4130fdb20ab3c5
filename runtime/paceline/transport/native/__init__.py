"""The native loops of the transports, built once per machine with the C compiler and then loaded.

    reduce.c  the steps of a schedule over MPI (`transport.mpi.native_loop`)
    shared.c  sums in shared memory (`transport.shm.native_loop`)
    copies.c  copies of large buffers (`copies`)
    peer_errors.c  errors of MPICH's connections (`transport.mpi.peer_errors`)
    common.h  included by the loops

The name of a library holds a hash of its source, of the header, of the processor type and of the
compiler flags. The library lies in the user's cache folder, where the first rank that needs it
compiles it, or beside its source, where the build of an image puts it (`python -m
paceline.transport.native`). Ranks that start together may all compile, since each renames its own
result into place. Where nothing can be compiled or stored, the transports use their loops in Python
and report it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from paceline.private_files import FOLDER_MODE, OTHERS_WRITE, ForeignFolderError, check_folder

REDUCE: Final = Path(__file__).with_name("reduce.c")
SHARED: Final = Path(__file__).with_name("shared.c")
COPIES: Final = Path(__file__).with_name("copies.c")
PEER_ERRORS: Final = Path(__file__).with_name("peer_errors.c")
SOURCES: Final = (REDUCE, SHARED, COPIES, PEER_ERRORS)
HEADER: Final = "common.h"
FLAGS: Final = ("-O3", "-fPIC", "-shared")
COMPILE_S: Final = 60.0


class UnavailableError(Exception):
    """Raised if there is no native loop in this process. The message says why."""


def load(source: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """Load the library made from a source file, and compile it first if needed.

    Args:
        source: One of `SOURCES`.
        mode: `ctypes.RTLD_GLOBAL` if libraries that are loaded later may call it.

    Returns:
        The loaded library.

    Raises:
        UnavailableError: It cannot be compiled, stored or trusted.
    """
    path = source.parent / file_name(source)
    try:
        if not path.exists():
            path = cache_folder() / file_name(source)
            if not path.exists():
                build(source, path.parent)
            check_folder(path.parent, "cache folder")
        about = path.lstat()
        if about.st_uid not in (os.geteuid(), 0) or about.st_mode & OTHERS_WRITE:
            raise UnavailableError(f"{path} may have been changed by another user; remove it")
        return ctypes.CDLL(str(path), mode)
    except OSError as error:
        raise UnavailableError(f"{path}: {error}") from error
    except ForeignFolderError as error:
        raise UnavailableError(f"{error.message}; hint: {error.hint}") from error


def file_name(source: Path) -> str:
    """Return the name of the library that is made from a source as it is now. May raise OSError."""
    facts = f"{platform.machine()} {FLAGS}".encode()
    texts = source.read_bytes() + source.with_name(HEADER).read_bytes()
    return f"{source.stem}-{hashlib.sha256(texts + facts).hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """Return the folder for libraries that were built on this machine.

    Returns:
        The folder, which need not exist.

    Raises:
        UnavailableError: The user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "paceline"
    except RuntimeError as error:
        raise UnavailableError(f"no cache folder: {error}") from error


def build(source: Path, target: Path) -> None:
    """Compile a source into a folder.

    It raises OSError if nothing can be written there.

    Args:
        source: One of `SOURCES`.
        target: Folder for the library. It is made if it does not exist.

    Raises:
        UnavailableError: There is no compiler, or it failed or was too slow.
    """
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise UnavailableError("no C compiler; hint: install one, or set CC")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(FOLDER_MODE, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix="build-") as folder:
        draft = Path(folder) / file_name(source)
        try:
            done = subprocess.run(
                [compiler, *FLAGS, "-o", str(draft), str(source)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{compiler} was not done in {COMPILE_S:g} s") from error
        if done.returncode != 0:
            raise UnavailableError(f"{compiler} failed: {done.stderr.strip()[-300:]}")
        draft.rename(target / draft.name)
