"""A daemon thread that runs callables one after the other.

The interpreter does not wait for it at exit, as it would for a thread of `concurrent.futures`: a
call that hangs in a driver must not keep a process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class SerialThread:
    """A daemon thread with a queue of callables.

    Any thread may call `do` and `end`. If a callable raises, the thread ends and calls `failed`
    with the exception.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; work that was queued before runs first."""
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Queue a callable and return at once."""
        self._work.put(work)

    def end(self) -> None:
        """Let the thread end after the work that is queued already; do not wait for it."""
        self._work.put(None)

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                work()
        except BaseException as error:
            self._failed(error)
