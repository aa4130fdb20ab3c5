"""File of the run folder with every line that the ranks have printed, and its time.

A line is `TIME AGENT TEXT`, with the time as a kubelet writes it and the text as the agent passed
it on. The lines are in order of time, because one process writes them as they come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from paceline_api.times import NS_PER_S

from paceline import private_files
from paceline.clock import wall_s

PRINTED: Final = "printed.log"
"""Name of the file."""


class Printed:
    """The file, open for more lines. If it cannot be written, lines are dropped.

    Args:
        run_dir: The run folder.
        on_line: Called after each line.
    """

    def __init__(self, run_dir: Path, on_line: Callable[[], None]) -> None:
        self.size = 0
        """Size of the file in bytes; a reader that has read as many bytes has read all lines."""
        self._on_line = on_line
        self._fd: int | None = None
        try:
            self._fd = private_files.append(run_dir / PRINTED)
            self.size = os.fstat(self._fd).st_size
        except OSError:
            pass  # a full disk must not end the job

    def add(self, agent: str, text: str) -> None:
        """Append a line with the present time."""
        if self._fd is None:
            return
        second, fraction_ns = divmod(round(wall_s() * NS_PER_S), NS_PER_S)
        at = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{fraction_ns:09}Z"
        try:
            self.size += os.write(self._fd, f"{at} {agent} {text}\n".encode(errors="replace"))
        except OSError:
            return  # the disk is full; later lines are tried again
        self._on_line()

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
