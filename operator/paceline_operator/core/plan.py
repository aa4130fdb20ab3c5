"""The worker pods as they are to be: those that count, those to make and those to delete.

Drawn up by decide/resize.py; what speaks against a pod for now is then taken out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline_api.types.enums import StragglerResponse

from paceline_operator.core.changes import Delete
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.coordinator_status import Rank
from paceline_operator.core.observed import Pod


class Cause(StrEnum):
    """Why a slot needs another pod."""

    NEW = "New"
    LOST = "Lost"
    FAILED = "Failed"
    REFUSED = "Refused"
    ENDED = "Ended"
    """With exit code 0 while the job goes on: drained, by whatever asked for it."""
    SLOW = "Slow"


@dataclass(frozen=True, slots=True)
class NewPod:
    slot: int
    attempt: int
    cause: Cause
    why: str
    notes: dict[str, str]
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Slow:
    rank: Rank
    pod: Pod
    slowdown_percent: int
    since_s: float
    action: StragglerResponse


@dataclass(slots=True)
class Plan:
    living: list[Pod] = field(default_factory=list)
    """Workers that count: neither ended, nor leaving, nor lost."""
    new: list[NewPod] = field(default_factory=list)
    delete: list[Delete] = field(default_factory=list)
    losses: dict[str, str] = field(default_factory=dict)
    """Pods gone with their node, by uid."""
    waiting: list[str] = field(default_factory=list)
    """Why slots stay empty for now."""
    no_fabric: str = ""
    """Why no pod can be made: there is no network for it."""
    surplus: int = 0
    """Workers that the coordinator has to choose and drain."""
    slow: tuple[Slow, ...] = ()
    clocks: Clocks = field(default_factory=Clocks)
    replaced: int = 0
    """Pods replaced so far, with those in `new`."""
    looks: list[float] = field(default_factory=list)
    hurry: bool = False

    def look(self, at_s: float | None) -> None:
        if at_s is not None:
            self.looks.append(at_s)

    def drop_new(self) -> None:
        """None of the new pods is to be made now."""
        self.keep_new(0)

    def keep_new(self, count: int) -> None:
        """Only so many of the new pods are to be made now."""
        self.replaced -= sum(new.cause is not Cause.NEW for new in self.new[count:])
        self.new = self.new[:count]

    def drop_growth(self) -> None:
        """Only replacements are to be made now."""
        self.new = [new for new in self.new if new.cause is not Cause.NEW]

    def keep_running(self, **clocks: Any) -> None:
        """Clocks, by the names of their fields."""
        self.clocks = replace(self.clocks, **clocks)
