"""Estimates the remaining time of a job from its speed in the last minutes.

The time between two calls counts, whatever it was spent on. So evaluations, checkpoints and changes
of the membership are included, as they will be in the rest of the job.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from paceline_api.times import NS_PER_S

from paceline.core.protocol.ledger import Ledger

MARK_NS: Final = 2 * NS_PER_S
"""Shortest interval between two marks, in nanoseconds."""
MARKS: Final = 60
"""Number of marks that are kept; with MARK_NS they span two minutes."""


class JobSpeed:
    """The speed of a job, observed by one rank. Communication thread only."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=MARKS)
        """Recent times, each with the job's progress at that time."""
        self._ledger: Ledger | None = None
        self.left_s: float | None = None
        """Remaining time in seconds; None while it is unknown or there is no progress."""

    def follow(self, now_ns: int, done: float, ledger: Ledger) -> None:
        """Note the job's progress.

        Args:
            now_ns: The present time.
            done: Progress from 0 to 1, according to the ledger.
            ledger: The log's ledger; another object means that the log was replaced by a donor's.
        """
        if ledger is not self._ledger:
            # A donor's ledger is ahead, although no time has passed.
            self._ledger = ledger
            self._marks.clear()
        if not self._marks or now_ns - self._marks[-1][0] >= MARK_NS:
            self._marks.append((now_ns, done))
        since_ns, before = self._marks[0]
        seconds = (now_ns - since_ns) / NS_PER_S
        known = done > before and now_ns - since_ns >= MARK_NS
        self.left_s = (1 - done) * seconds / (done - before) if known else None
