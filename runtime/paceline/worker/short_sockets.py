"""Where `multiprocessing` makes its sockets, such as those of a loader's workers.

They lie in TMPDIR, and the path of a socket is limited to 107 bytes. A rank's TMPDIR is several
folders below that of the run, so where that one is long they would not fit: each batch would fail
in its worker with "AF_UNIX path too long", and the script would wait for it for ever.
"""

from __future__ import annotations

import os
import tempfile
from multiprocessing import process
from typing import Any, Final

PATH_MAX: Final = 107
BELOW: Final = len("/pymp-12345678/listener-12345678")
_FOLDER: Final = "tempdir"


def use_folder(folder: str) -> bool:
    """Have them made in `folder` if TMPDIR leaves no room; return True if so.

    `multiprocessing` has no public setting for it; this is where it keeps its own choice, which the
    workers that it starts inherit."""
    too_long = len(os.fsencode(tempfile.gettempdir())) + BELOW > PATH_MAX
    if not too_long or _config().get(_FOLDER) is not None:
        return False
    _config()[_FOLDER] = folder
    return True


def restore(folder: str) -> None:
    """Take that back."""
    if _config().get(_FOLDER) == folder:
        del _config()[_FOLDER]


def _config() -> dict[str, Any]:
    config: dict[str, Any] = getattr(process.current_process(), "_config")  # noqa: B009
    return config
