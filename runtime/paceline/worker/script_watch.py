"""Limits how long a script may run between two calls of step().

It detects an endless loop or a blocking read in a script. Other ranks wait for a rank in Full, and
its last batch is waited for in every mode. After a while the rank's heartbeats report since when
its script has been away, and where it is. After `spec.stepDeadlineSeconds` the rank reports that as
the error of its script, and ends. A rank whose threads are all stuck cannot do this: it is silent,
which its coordinator detects (R6, R35).
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paceline_api.times import NS_PER_S

from paceline.clock import now_ns, wall_s
from paceline.core.messages import STUCK, Away, ScriptError
from paceline.worker.script_frames import innermost, is_own

NAMED_NS: Final = 60 * NS_PER_S
"""Time after which heartbeats name the script's place; at most half of the script's limit."""
LOOK_NS: Final = NS_PER_S
"""Upper bound on the interval between two checks, in nanoseconds."""
LINES_MAX: Final = 15
"""Upper bound on the lines of a traceback in a report."""

Overdue = Callable[[str, ScriptError], None]


@dataclass(slots=True)
class ScriptClock:
    """Measures how long the script has been away. Pure: call `look` periodically.

    Only the time between checks that came on time is counted, because a process that was stopped
    did not have the rest.
    """

    every_ns: int
    since_ns: int | None = None
    """Time at which the script left, as of the last check; None if it was in a call of Paceline."""
    looked_ns: int = 0
    away_ns: int = 0

    def look(self, now_ns: int, since_ns: int | None) -> int:
        """Return how long the script has been away, in nanoseconds.

        Args:
            now_ns: Time of this check.
            since_ns: When the script left its last call of Paceline; None if it is in one now.

        Returns:
            The time away that was counted so far, in nanoseconds; 0 if the script is in a call.
        """
        if since_ns is None:
            self.away_ns = 0
        elif since_ns != self.since_ns:
            self.away_ns = min(now_ns - since_ns, 2 * self.every_ns)
        else:
            self.away_ns += min(now_ns - self.looked_ns, 2 * self.every_ns)
        self.since_ns, self.looked_ns = since_ns, now_ns
        return self.away_ns


class ScriptWatch:
    """Watches the script of one rank, on a thread of its own.

    Make it on the thread that runs the script. That thread calls `start`, `left` and `came`. The
    communication thread may call `close` too, at the end of the job. The link thread reads `away`.
    """

    def __init__(self, bound_ns: int, overdue: Overdue) -> None:
        """Create a watch that begins with `start`.

        Args:
            bound_ns: How long the script may be away, in nanoseconds.
            overdue: Called on the watch's own thread when the script was away for too long, with a
                message that says where it was, and with the error to report. Then the process ends
                with exit code 1.
        """
        self.away: Away | None = None
        self._bound_ns, self._overdue = bound_ns, overdue
        self._since_ns: int | None = None
        self._named_ns = min(NAMED_NS, bound_ns // 2)
        self._every_ns = min(LOOK_NS, bound_ns // 10)
        self._clock = ScriptClock(self._every_ns)
        self._script = threading.get_ident()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)

    def start(self) -> None:
        """Start the thread that checks the script."""
        self._thread.start()

    def left(self) -> None:
        """Start the clock: the script runs its own code from now on."""
        self._since_ns = now_ns()

    def came(self) -> None:
        """Stop the clock: the script has called Paceline, or may take its time."""
        self._since_ns = None

    def close(self) -> None:
        """Stop watching for good; the thread ends at its next check."""
        self.came()
        self.away = None
        self._ends.set()

    def look(self, now_ns: int) -> None:
        """Check the script once: report where it is, or end the process at its deadline."""
        away_ns = self._clock.look(now_ns, self._since_ns)
        if away_ns < self._named_ns:
            self.away = None
        elif away_ns >= self._bound_ns:
            self._end()
        elif self.away is None:
            self.away = Away(round(wall_s() - away_ns / NS_PER_S, 3), *innermost(self._stack()))

    def _run(self) -> None:
        while not self._ends.wait(self._every_ns / NS_PER_S):
            self.look(now_ns())

    def _stack(self) -> traceback.StackSummary:
        frame = sys._current_frames().get(self._script)  # noqa: SLF001 - the documented way
        return traceback.extract_stack(frame)

    def _end(self) -> None:
        stack = self._stack()
        bound = f"{self._bound_ns / NS_PER_S:g} s"
        error = ScriptError(
            STUCK, f"step() was not called for {bound}, spec.stepDeadlineSeconds", *innermost(stack)
        )
        shown = [frame for frame in stack if not is_own(frame.filename)]
        lines = "".join(traceback.StackSummary.from_list(shown).format()).splitlines()[-LINES_MAX:]
        text = "\n".join(lines)
        self._overdue(f"{error}; last lines:\n{text}", error)
        os.write(2, f"error: {error}; the script was here:\n{text}\n".encode())
        os._exit(1)
