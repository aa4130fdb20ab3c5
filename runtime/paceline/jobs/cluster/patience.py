"""Retries while the API server is away; reports the outage once, and its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from paceline_api.errors import PacelineError

from paceline.clock import now_ns, pause
from paceline.jobs.core.outage import Outage, OutageVerdict
from paceline.jobs.errors import AwayError

RETRY_S: Final = 1.0
"""Seconds between two attempts."""
Found = TypeVar("Found")


class Patience:
    """Retry loop for one API server; the threads that ask this server share it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Create it for a server that has answered so far.

        Args:
            say: Called with a message when an outage lasts and when it is over. Any of the threads
                calls it, with the lock held.
        """
        self._say, self._outage = say, Outage()
        self._lock = threading.Lock()

    @property
    def outage(self) -> bool:
        """Return True if the API server did not answer the last request."""
        with self._lock:
            return self._outage.lasts

    def asked(self, ask: Callable[[], Found]) -> Found:
        """Call `ask` until it succeeds, and return its result.

        An error is raised where `rest` raises it.

        Args:
            ask: Sends one request; it may be called several times.

        Returns:
            The result of `ask`.
        """
        while True:
            try:
                answer = ask()
            except PacelineError as error:
                self.rest(error)
                continue
            self.answered()
            return answer

    def rest(self, error: PacelineError) -> None:
        """Wait before the next attempt, or raise `error` if another attempt is of no use.

        The first error of an outage must be an AwayError. During an outage every error is retried,
        because a server that has just started rejects requests that it accepts once it has read its
        roles. `error` is raised again if it is no sign of an outage, or if the outage has lasted
        for `outage.BORNE_NS`.

        Args:
            error: The error of the last attempt.
        """
        with self._lock:
            if not self._outage.lasts and not isinstance(error, AwayError):
                raise error
            match self._outage.missed(now_ns()):
                case OutageVerdict.GIVE_UP:
                    raise error
                case OutageVerdict.SAY_SO:
                    self._say(f"{error.message}; trying again until it does")
        pause(RETRY_S)

    def answered(self) -> None:
        """Record that the API server has answered; report the end of an outage."""
        with self._lock:
            if self._outage.answered():
                self._say("the API server answers again")
