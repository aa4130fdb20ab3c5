"""A file system of a few bytes, for tests of what happens when a disk is full."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MNT_DETACH = 2


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs, or skip the test by name.

    Args:
        folder: mount point, which is made.
        size: size as in mount(8).

    Yields:
        the folder.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()) != 0:
        pytest.skip(f"no mount here: {os.strerror(ctypes.get_errno())}")
    yield folder
    assert libc.umount2(bytes(folder), MNT_DETACH) == 0
