"""How to read bytes that somebody else may have written: never more of them than a bound.

A file that was damaged, or put there by somebody else, can be larger than memory, a pipe that
nobody writes to, or a device without an end. Nothing of that may cost a reader its memory or hold
it up.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol


class Readable(Protocol):
    """An open file, or the answer to an HTTP request."""

    def read(self, size: int, /) -> bytes: ...


class TooLargeError(OSError):
    """Raised for bytes that are more than a reader takes."""


def read_at_most(stream: Readable, bytes_max: int) -> bytes:
    """Return all bytes of a stream.

    Raises:
        TooLargeError: There are more than `bytes_max`, of which no more than one was read.
        OSError: It cannot be read.
    """
    data = stream.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise TooLargeError(f"it is larger than {bytes_max:,} bytes")
    return data


def read_file(path: Path, bytes_max: int) -> bytes:
    """Return all bytes of a regular file. Symbolic links are followed; nothing else is waited for.

    Raises:
        TooLargeError: There are more than `bytes_max`, of which no more than one was read.
        OSError: It cannot be read, or is something else than a regular file.
    """
    with open(path, "rb", opener=_open_at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError("it is no regular file")
        return read_at_most(stream, bytes_max)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; that of a pipe does not wait for somebody who writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)
