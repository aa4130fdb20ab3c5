"""The figures of `pl.log` as TensorBoard events: `spec.logging.tensorBoard`.

The lowest active rank writes the means over all ranks, once per round; all ranks know the same
(R42), so whoever takes its place goes on in a file of its own. A thread writes, so that a slow
folder never delays a round. What it cannot keep up with is left out and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from paceline_api.errors import PacelineError
from paceline_api.ids import MemberId

from paceline.clock import wall_s
from paceline.core.protocol.records import LoggedMetric

log = logging.getLogger("paceline.rank")

WAITING_MAX: Final = 4096
"""Upper bound on the rounds that wait to be written."""
FLUSH_S: Final = 5
"""Seconds after which written events are in the file, at the latest."""
CLOSE_S: Final = 10.0
"""Seconds that the end of a rank waits for the last events to be written."""

Round = tuple[int, float, tuple[LoggedMetric, ...]]
"""Number of the round, Unix time in seconds, and the sums over its contributors."""


class Board:
    """Writer of one rank's event file, which is made with the first round that it reports."""

    def __init__(self, folder: Path, me: MemberId) -> None:
        """Import TensorBoard's writer, and start the thread.

        Args:
            folder: Folder for the event files of all ranks; made if it is missing.
            me: This rank; its file has that suffix.

        Raises:
            PacelineError: The package tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PacelineError(
                f"spec.logging.tensorBoard needs the package tensorboard: {error}",
                hint="pip install tensorboard, also in the job's image, or remove spec.logging",
            ) from None
        self._make: Any = SummaryWriter
        self._folder, self._me = folder, me
        self._waiting: queue.Queue[Round | None] = queue.Queue(WAITING_MAX)
        self._given = self._written = 0
        self._thread = threading.Thread(target=self._write, name="paceline-board", daemon=True)
        self._thread.start()

    def add(self, number: int, figures: Sequence[LoggedMetric]) -> None:
        """Hand over the figures of a round; returns at once.

        Args:
            number: Number of the round, the horizontal axis.
            figures: Sums of the round's contributors, at most one of each name.
        """
        shown = tuple(figure for figure in figures if figure.weight)
        if not shown:
            return
        self._given += 1
        with suppress(queue.Full):
            self._waiting.put_nowait((number, wall_s(), shown))

    def close(self) -> None:
        """Write what waits, for at most CLOSE_S, and close the file."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S / 2)
        self._thread.join(CLOSE_S / 2)
        missing = self._given - self._written
        if missing:
            log.warning(
                "spec.logging.tensorBoard: the figures of %d rounds are missing in %s, because the "
                "folder was too slow or could not be written",
                missing,
                self._folder,
            )

    def _write(self) -> None:
        writer: Any = None
        try:
            while (item := self._waiting.get()) is not None:
                number, at_s, figures = item
                # Events after this round are those of ranks whose rounds were lost with them.
                writer = writer or self._make(
                    str(self._folder),
                    purge_step=number,
                    flush_secs=FLUSH_S,
                    filename_suffix=f".{str(self._me).replace('#', '-')}",
                )
                for figure in figures:
                    mean = figure.total / figure.weight
                    writer.add_scalar(figure.name, mean, number, walltime=at_s)
                self._written += 1
            if writer is not None:
                writer.close()
        except OSError as error:
            log.warning("spec.logging.tensorBoard: %s: %s", self._folder, error)
            while self._waiting.get() is not None:
                pass
