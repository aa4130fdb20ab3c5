"""How long the rest of a job takes, at the speed of its last minutes.

Time between two looks counts whatever it was spent on, so evaluations, checkpoints and changes of
the membership are in it as they will be in the rest.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from paceline.clock import NS_PER_S
from paceline.core.protocol.ledger import Ledger

MARK_NS: Final = 2 * NS_PER_S
MARKS: Final = 60
"""Two minutes."""


class Pace:
    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=MARKS)
        """When the job was how far."""
        self._ledger: Ledger | None = None
        self.left_s: float | None = None
        """None: not known yet, or nothing moves."""

    def follow(self, now_ns: int, done: float, ledger: Ledger) -> None:
        """`done`: from 0 to 1, by what this ledger holds."""
        if ledger is not self._ledger:
            # A donor's: it is further, and no time has passed.
            self._ledger = ledger
            self._marks.clear()
        if not self._marks or now_ns - self._marks[-1][0] >= MARK_NS:
            self._marks.append((now_ns, done))
        since_ns, before = self._marks[0]
        seconds = (now_ns - since_ns) / NS_PER_S
        known = done > before and now_ns - since_ns >= MARK_NS
        self.left_s = (1 - done) * seconds / (done - before) if known else None
