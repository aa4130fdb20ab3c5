"""Live display of a run: a table on a terminal, otherwise a line every ten seconds.

The display is for people and goes to stderr. What the ranks print is passed on to stdout, or shown
above the table. A line has the same figures as the table's heading, with the time that is left and
what the script reports, such as its loss.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import Final, Self, TextIO

from paceline_api.errors import printable_lines
from paceline_api.status import Status
from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.cli.table import line, table
from paceline.clock import wall_s
from paceline.local.timeline import Timeline

LINE_S: Final = 10.0
"""Seconds between two lines where the output is not a terminal."""
PAINT_S: Final = 0.25
"""Seconds between two updates of the table."""


class Screen:
    """Asynchronous context manager that shows the latest status until the end of the block."""

    def __init__(self, *, quiet: bool, raw: bool = False, data: bool = False) -> None:
        """Create the display; nothing is shown yet.

        Args:
            quiet: Show events and the summary only, neither table nor lines.
            raw: Pass on what ranks print unchanged, with escape sequences.
            data: Print what ranks print to stderr, because stdout is for data.
        """
        self._quiet, self._raw = quiet, raw
        self._ranks = sys.stderr if data else sys.stdout
        self._console = _Console(
            stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        self._live: Live | None = None
        self._status: Status | None = None
        self._timeline = Timeline()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        if not self._quiet:
            self._task = asyncio.create_task(self._paint())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._live is not None:
            with _as_long_as_read(sys.stderr):
                self._live.stop()

    def show(self, status: Status, timeline: Timeline) -> None:
        """Set the status and timeline that the next update shows."""
        self._status, self._timeline = status, timeline

    def say(self, text: str) -> None:
        """Print an event with the time of day."""
        self.write(f"{datetime.fromtimestamp(wall_s()):%H:%M:%S} {text}")

    def write(self, text: str) -> None:
        """Print text to stderr, above the table if there is one."""
        with _as_long_as_read(sys.stderr):
            self._console.print(printable_lines(text))

    def on_line(self, text: str) -> None:
        """Print a line that a rank has printed."""
        if self._live is not None and self._raw:
            with _as_long_as_read(sys.stderr):
                self._console.print(Text.from_ansi(text))
        elif self._live is not None:
            self.write(text)
        else:
            with _as_long_as_read(self._ranks):
                self._ranks.write(f"{text if self._raw else printable_lines(text)}\n")
                self._ranks.flush()

    async def _paint(self) -> None:
        shown = ""
        while True:
            if self._live is not None:
                with _as_long_as_read(sys.stderr):
                    self._live.update(table(self._status, self._timeline), refresh=True)
                await asyncio.sleep(PAINT_S)
            else:
                text = line(self._status, self._timeline)
                if text != shown:  # an unchanged line is printed once
                    self.say(text)
                shown = text
                await asyncio.sleep(LINE_S)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Discard further output; rich itself would end the program."""
        _discard(sys.stderr)


@contextmanager
def _as_long_as_read(stream: TextIO) -> Iterator[None]:
    """Ignore errors of a stream inside the block, and discard its further output.

    The job goes on when the reader of the stream has gone, as in `paceline run job.yaml | head`,
    when its terminal was closed, and when it is a file on a full disk.

    Args:
        stream: stdout or stderr.

    Yields:
        None.
    """
    try:
        yield
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
