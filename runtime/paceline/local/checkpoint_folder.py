"""Lock on a checkpoint folder: two runs in one folder would remove each other's checkpoints.

The kernel holds the lock, so a run that is killed leaves none behind. If a folder cannot be locked,
the run starts without a lock, and the ranks report what is wrong with the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline import private_files

LOCK: Final = ".run.lock"
WHAT: Final = "checkpoint folder"


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold the lock on a checkpoint folder for the duration of the block.

    The folder is made if it does not exist. An existing folder keeps its mode, and files in it are
    as readable as the folder is (`worker.checkpoint.writer`). A folder that another user can write
    to raises ForeignFolderError, because that user could change what a run continues from.

    Args:
        path: The checkpoint folder; None for a job without checkpoints.

    Yields:
        Nothing.

    Raises:
        PacelineError: Another run holds the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            if path is not None:
                private_files.make_folder(path, WHAT)
                descriptor = private_files.append(path / LOCK)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PacelineError(
                f"another run keeps its checkpoints in {path}",
                hint="wait for its end (`paceline status`), or choose another folder with "
                "--set spec.checkpoint.path=...",
                exit_code=EXIT_BAD_INPUT,
            ) from None
        except OSError:
            pass  # the file system has no locks, or we may not write to it
        yield
