"""Whether the API server is away, as somebody finds out who asks it again and again."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

NS_PER_S: Final = 1_000_000_000
TOLD_AFTER_NS: Final = 1 * NS_PER_S
"""One that has broken off a watch may answer at the next question."""
BORNE_NS: Final = 300 * NS_PER_S
"""An outage is borne for so long; an upgrade of a control plane takes less."""


class Verdict(StrEnum):
    """What to do about an answer that did not come."""

    TRY_AGAIN = "try again"
    SAY_SO = "say so"
    """And try again."""
    GIVE_UP = "give up"


class Outage:
    """Times are of a clock that never goes back."""

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._told = False

    @property
    def lasts(self) -> bool:
        return self._since_ns is not None

    def missed(self, now_ns: int) -> Verdict:
        """An answer did not come; SAY_SO once in each outage."""
        if self._since_ns is None:
            self._since_ns = now_ns
        away_ns = now_ns - self._since_ns
        if away_ns >= BORNE_NS:
            return Verdict.GIVE_UP
        if self._told or away_ns < TOLD_AFTER_NS:
            return Verdict.TRY_AGAIN
        self._told = True
        return Verdict.SAY_SO

    def answered(self) -> bool:
        """Whether to say that it is over."""
        told, self._told, self._since_ns = self._told, False, None
        return told
