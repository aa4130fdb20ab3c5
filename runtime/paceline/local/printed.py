"""What the ranks of a run have printed, each line with its time: one file of the run folder.

A line is `TIME AGENT TEXT`, with the time as a kubelet writes it and the text as the agent passed
it on. They lie in order of time, since one process writes them as they come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from paceline import private_files
from paceline.clock import NS_PER_S, wall_s

PRINTED: Final = "printed.log"


class Printed:
    """The file, open for more lines."""

    def __init__(self, run_dir: Path, on_line: Callable[[], None]) -> None:
        """`on_line` is called after each line."""
        self.size = 0
        """Bytes of the file; a reader that has so many has all."""
        self._on_line = on_line
        self._fd: int | None = None
        try:
            self._fd = private_files.append(run_dir / PRINTED)
            self.size = os.fstat(self._fd).st_size
        except OSError:
            pass  # a job is not ended because its disk is full

    def add(self, agent: str, text: str) -> None:
        if self._fd is None:
            return
        second, fraction_ns = divmod(round(wall_s() * NS_PER_S), NS_PER_S)
        at = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{fraction_ns:09}Z"
        try:
            self.size += os.write(self._fd, f"{at} {agent} {text}\n".encode(errors="replace"))
        except OSError:
            return  # the disk is full; whatever is printed later finds room, or not
        self._on_line()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
