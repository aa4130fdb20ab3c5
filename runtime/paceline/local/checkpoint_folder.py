"""One run at a time keeps its checkpoints in a folder: two would remove each other's.

The lock is the kernel's, so a run that is killed leaves none behind. A folder that cannot be locked
is left to the ranks, which say what is wrong with it.
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
    """For this run, or PacelineError if another one has it, or if somebody else can change what a
    run would go on from. A folder that is there keeps its mode, and files in it are as readable as
    it is (`worker.checkpoint.writer`). None: no checkpoints."""
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
            pass  # a file system without locks, or not ours to write to
        yield
