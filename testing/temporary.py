"""Temporary folders of test runs, benchmarks and tools.

If the owner of a folder is killed, a later owner removes the folder. Like those of the product
(`paceline.scratch`) each folder has a file with a lock, which the kernel releases however the owner
ends. Jobs that a killed owner has started may still run, so a folder stays as long as a process
works in it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline import scratch

from testing import left_files

PREFIX: Final = "plt-"
"""Prefix of each name. It is short, since paths of sockets begin with it."""
ENV_RUN: Final = "TEST_RUN_OF_PACELINE"
"""Environment variable of all processes of a test run, with a mark that no other run has."""


class OwnFolder:
    """A temporary folder, and the lock on it."""

    def __init__(self, base: Path | None = None) -> None:
        """Make the folder, after removing abandoned ones beside it.

        Args:
            base: parent folder; by default TMPDIR.
        """
        base = base or Path(tempfile.gettempdir())
        sweep(base)
        self.path, self._lock = _make(base)

    def close(self) -> None:
        """Remove the folder with everything in it."""
        scratch.remove([self.path])
        os.close(self._lock)


@contextmanager
def temporary_folder(base: Path | None = None) -> Iterator[Path]:
    """Yield a folder that is removed at the end of the block.

    If this process is killed, the next owner of such a folder removes it.

    Args:
        base: parent folder; by default TMPDIR.

    Yields:
        the folder.
    """
    own = OwnFolder(base)
    try:
        yield own.path
    finally:
        own.close()


def sweep(base: Path) -> None:
    """Remove the folders below `base` of killed owners, with everything in them."""
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            # A folder without the file has just been made. The lock of one in use raises.
            if not (path / scratch.LOCK).is_file() or path.stat().st_uid != os.getuid():
                continue
            lock = scratch._lock(path)
            if lock is None:
                continue
            used = left_files.processes_of(path)
            os.close(lock)
            if not used:
                scratch._sweep_one(path)


def _make(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        # Another process may be looking at the folder, or may have removed it.
        with contextlib.suppress(BlockingIOError):
            if (lock := scratch._lock(path)) is not None:
                return path, lock
