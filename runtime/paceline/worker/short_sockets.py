"""Keeps the socket paths of `multiprocessing`, such as those of a loader's workers, short enough.

These sockets lie in TMPDIR, and the path of a socket is limited to 107 bytes. A rank's TMPDIR is
several folders below that of the run. If that path is long, the sockets do not fit: each batch
would fail in its worker with "AF_UNIX path too long", and the script would wait for it forever.
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
    """Let `multiprocessing` make its sockets in `folder` if the path of TMPDIR is too long.

    `multiprocessing` has no public setting for this. The function sets the private option in which
    it keeps its own choice, which the workers that it starts inherit.

    Returns:
        True if `folder` is used; False if TMPDIR is short enough or a folder was chosen already.
    """
    too_long = len(os.fsencode(tempfile.gettempdir())) + BELOW > PATH_MAX
    if not too_long or _config().get(_FOLDER) is not None:
        return False
    _config()[_FOLDER] = folder
    return True


def restore(folder: str) -> None:
    """Undo `use_folder`, if `folder` is still in use."""
    if _config().get(_FOLDER) == folder:
        del _config()[_FOLDER]


def _config() -> dict[str, Any]:
    config: dict[str, Any] = getattr(process.current_process(), "_config")  # noqa: B009
    return config
