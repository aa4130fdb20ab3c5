"""The bound of a script between two calls of step(): an endless loop or a blocking read in it.

Other ranks wait for a rank in Full, and its last batch is waited for in every mode. After a while
the rank's heartbeats say since when its script is away, and where it is. After
`spec.stepDeadlineSeconds` the rank reports that as the error of its script, and ends. A rank whose
threads are all stuck cannot do this: it is silent, which its coordinator notices (R6, R35).
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paceline.clock import NS_PER_S, now_ns, wall_s
from paceline.core.messages import STUCK, Away, ScriptError
from paceline.worker.script_frames import innermost, is_own

NAMED_NS: Final = 60 * NS_PER_S
"""A script that has been away for so long is named, or for half of its bound."""
LOOK_NS: Final = NS_PER_S
"""Between two looks at the longest."""
LINES_MAX: Final = 15

Overdue = Callable[[str, ScriptError], None]


@dataclass(slots=True)
class ScriptClock:
    """For how long the script has been away. Pure: `look` is called now and then.

    Only the time between looks that came when they were due is counted: a process that was stopped
    has not had the time."""

    every_ns: int
    since_ns: int | None = None
    """What was looked at last; None: the script was in a call of Paceline."""
    looked_ns: int = 0
    away_ns: int = 0

    def look(self, now_ns: int, since_ns: int | None) -> int:
        """Return for how long the script that left at `since_ns` has been away, in nanoseconds."""
        if since_ns is None:
            self.away_ns = 0
        elif since_ns != self.since_ns:
            self.away_ns = min(now_ns - since_ns, 2 * self.every_ns)
        else:
            self.away_ns += min(now_ns - self.looked_ns, 2 * self.every_ns)
        self.since_ns, self.looked_ns = since_ns, now_ns
        return self.away_ns


class ScriptWatch:
    """Of one rank. `left` and `came` are called by the thread that runs the script, which is the
    one that makes this; `away` is read by the link thread."""

    def __init__(self, bound_ns: int, overdue: Overdue) -> None:
        """
        Args:
            bound_ns: How long the script may be away.
            overdue: Is told, on the watch's own thread, where the script was, and what it is to be
                reported as. Then the process ends with exit code 1.
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
        self._thread.start()

    def left(self) -> None:
        """The script goes on by itself from now on."""
        self._since_ns = now_ns()

    def came(self) -> None:
        """The script has called Paceline, or may take its time."""
        self._since_ns = None

    def close(self) -> None:
        self.came()
        self.away = None
        self._ends.set()

    def look(self, now_ns: int) -> None:
        """Name the script, or end it, if its time has come."""
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
