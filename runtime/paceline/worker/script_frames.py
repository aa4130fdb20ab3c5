"""Which lines of a traceback are the script's own: neither Paceline's nor those of packages."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

OWN: Final = str(Path(__file__).resolve().parents[1])
INSTALLED: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def is_own(filename: str) -> bool:
    """Return True for a file of Paceline."""
    return filename.startswith(OWN)


def innermost(frames: Sequence[traceback.FrameSummary]) -> tuple[str, int]:
    """Return file and line of the last frame that is the script's, or a module's beside it; an
    empty file if there is none."""
    for frame in reversed(frames):
        if not is_own(frame.filename) and not frame.filename.startswith(INSTALLED):
            return frame.filename, frame.lineno or 0
    return "", 0
