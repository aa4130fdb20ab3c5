"""The native loops of the transports: built once per machine with the C compiler, then loaded.

    reduce.c  the steps of a schedule over MPI (`transport.mpi.native_loop`)
    shared.c  sums in shared memory (`transport.shm.native_loop`)
    common.h  what both of them include

A library's name holds the hash of its source and of that header. It lies in the user's cache
folder, so that it is compiled by the first rank that ever needs it, or beside its source, where the
making of an image puts it (`python -m paceline.transport.native`). Ranks that start together may
all compile: each renames its own result into place. Where nothing can be compiled or kept, the
transports do the same in Python and say so.
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
SOURCES: Final = (REDUCE, SHARED)
HEADER: Final = "common.h"
FLAGS: Final = ("-O3", "-fPIC", "-shared")
COMPILE_S: Final = 60.0


class UnavailableError(Exception):
    """There is no native loop in this process, and why."""


def load(source: Path) -> ctypes.CDLL:
    """The library made of it, compiled if need be. Raises UnavailableError."""
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
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{path}: {error}") from error
    except ForeignFolderError as error:
        raise UnavailableError(f"{error.message}; hint: {error.hint}") from error


def file_name(source: Path) -> str:
    """Of the library that is made of this source now, here. Raises OSError."""
    facts = f"{platform.machine()} {FLAGS}".encode()
    texts = source.read_bytes() + source.with_name(HEADER).read_bytes()
    return f"{source.stem}-{hashlib.sha256(texts + facts).hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """Where libraries that were built on this machine are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "paceline"
    except RuntimeError as error:
        raise UnavailableError(f"no cache folder: {error}") from error


def build(source: Path, target: Path) -> None:
    """Compile into a folder. Raises UnavailableError, or OSError where nothing can be written."""
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
