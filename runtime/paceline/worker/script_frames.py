"""Separates the script's own lines of a traceback from those of Paceline and of packages."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

OWN: Final = str(Path(__file__).resolve().parents[1])
INSTALLED: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def is_own(filename: str) -> bool:
    """Return True if the file belongs to Paceline."""
    return filename.startswith(OWN)


def is_frozen(filename: str) -> bool:
    """Return True if the file is a part of the interpreter itself, such as runpy."""
    return filename.startswith("<frozen ")


@cache
def belongs_to_script(filename: str) -> bool:
    """Return True if the file is the script, or a module beside it."""
    if is_own(filename) or is_frozen(filename):
        return False
    return not filename.startswith(INSTALLED)


def innermost(frames: Sequence[traceback.FrameSummary]) -> tuple[str, int]:
    """Return the place of the innermost frame that belongs to the script.

    Modules beside the script count as the script's.

    Args:
        frames: A traceback, the innermost frame last.

    Returns:
        File and line; an empty file and 0 if no frame belongs to the script.
    """
    for frame in reversed(frames):
        if belongs_to_script(frame.filename):
            return frame.filename, frame.lineno or 0
    return "", 0
