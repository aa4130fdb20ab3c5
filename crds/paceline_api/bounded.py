"""Bounded reading of untrusted bytes.

A file that was damaged, or replaced by another user, can be larger than memory, a pipe without a
writer, or an endless device. A reader must neither run out of memory nor block on it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol


class Readable(Protocol):
    """An open file, or the body of an HTTP response."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; fewer only at the end."""


class TooLargeError(OSError):
    """Raised for data that is larger than the reader's bound."""


def read_at_most(stream: Readable, bytes_max: int) -> bytes:
    """Return all bytes of a stream; an OSError of the stream is passed on.

    Args:
        stream: The stream, at its beginning.
        bytes_max: Upper bound on the size in bytes.

    Returns:
        The bytes.

    Raises:
        TooLargeError: There are more than `bytes_max`; only one byte more was read.
    """
    data = stream.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise TooLargeError(f"it is larger than {bytes_max:,} bytes")
    return data


def read_file(path: Path, bytes_max: int) -> bytes:
    """Return all bytes of a regular file; never wait for anything but a disk.

    Symbolic links are followed. A file of more than `bytes_max` bytes raises TooLargeError.

    Args:
        path: Path of the file.
        bytes_max: Upper bound on the size in bytes.

    Returns:
        The bytes.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    with open(path, "rb", opener=_open_at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError("it is not a regular file")
        return read_at_most(stream, bytes_max)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file for reading; a pipe is opened without waiting for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)
