"""Decision whether to retry, report or give up while the API server does not answer."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from paceline_api.times import NS_PER_S

REPORTED_AFTER_NS: Final = 1 * NS_PER_S
"""Duration of an outage after which it is reported. A server that has broken off a watch may answer
the next request."""
BORNE_NS: Final = 300 * NS_PER_S
"""Duration of an outage after which a caller gives up. An upgrade of a control plane takes less."""


class OutageVerdict(StrEnum):
    """Actions after a request that was not answered."""

    TRY_AGAIN = "try again"
    SAY_SO = "say so"
    """Report the outage, and try again."""
    GIVE_UP = "give up"


class Outage:
    """State of an outage of one server; times are on a monotonic clock."""

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._reported = False

    @property
    def lasts(self) -> bool:
        """Return True if the last request was not answered."""
        return self._since_ns is not None

    def missed(self, now_ns: int) -> OutageVerdict:
        """Record that a request was not answered, and decide what to do.

        Args:
            now_ns: Current time on a monotonic clock.

        Returns:
            SAY_SO once in each outage; GIVE_UP after `BORNE_NS`.
        """
        if self._since_ns is None:
            self._since_ns = now_ns
        away_ns = now_ns - self._since_ns
        if away_ns >= BORNE_NS:
            return OutageVerdict.GIVE_UP
        if self._reported or away_ns < REPORTED_AFTER_NS:
            return OutageVerdict.TRY_AGAIN
        self._reported = True
        return OutageVerdict.SAY_SO

    def answered(self) -> bool:
        """Record an answer; return True if the end of a reported outage is to be reported."""
        was_reported, self._reported, self._since_ns = self._reported, False, None
        return was_reported
