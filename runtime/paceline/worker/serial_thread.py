"""A daemon thread that does what it is given, one after the other.

The interpreter does not wait for it at its end, as it would for those of `concurrent.futures`: what
hangs in a driver must not keep a process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class SerialThread:
    """`do` and `end` from any thread; `failed` is called on this one, with what ended it."""

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def end(self) -> None:
        """After what it has been given."""
        self._work.put(None)

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                work()
        except BaseException as error:
            self._failed(error)
