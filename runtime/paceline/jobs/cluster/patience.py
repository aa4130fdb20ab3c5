"""Bears an API server that is away while somebody watches: says so once, and that it is back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from paceline_api.errors import PacelineError

from paceline.clock import now_ns, pause
from paceline.jobs.core.outage import Outage, Verdict
from paceline.jobs.errors import AwayError

RETRY_S: Final = 1.0
Found = TypeVar("Found")


class Patience:
    """Shared by the threads that ask one server."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say`: for who reads; called by any of the threads."""
        self._say, self._outage = say, Outage()
        self._lock = threading.Lock()

    @property
    def outage(self) -> bool:
        """The server was away when it was asked last."""
        with self._lock:
            return self._outage.lasts

    def asked(self, ask: Callable[[], Found]) -> Found:
        """The answer, when there is one. Raises what `rest` raises."""
        while True:
            try:
                found = ask()
            except PacelineError as error:
                self.rest(error)
                continue
            self.answered()
            return found

    def rest(self, error: PacelineError) -> None:
        """Before the next try; raises `error` where another try is of no use. A server that has
        just begun refuses what it will allow when it has read its roles."""
        with self._lock:
            if not self._outage.lasts and not isinstance(error, AwayError):
                raise error
            match self._outage.missed(now_ns()):
                case Verdict.GIVE_UP:
                    raise error
                case Verdict.SAY_SO:
                    self._say(f"{error.message}; trying again until it does")
        pause(RETRY_S)

    def answered(self) -> None:
        with self._lock:
            if self._outage.answered():
                self._say("the API server answers again")
