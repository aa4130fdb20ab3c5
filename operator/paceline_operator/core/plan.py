"""The plan for a job's worker pods: which ones count, which to create and which to delete.

`decide/resize.py` makes the plan. Later steps remove pods from it that cannot be created now.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from paceline_api.status import RankStatus
from paceline_api.types.enums import StragglerResponse

from paceline_operator.core.changes import Delete
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.observed import Pod

NAMED_MAX: Final = 4
"""Upper bound on the number of pods that a message names."""


class ReplacementCause(StrEnum):
    """Reason why a slot needs a new pod."""

    NEW = "New"
    LOST = "Lost"
    FAILED = "Failed"
    REFUSED = "Refused"
    ENDED = "Ended"
    """The pod ended with exit code 0 while the job continues: it was drained."""
    SLOW = "Slow"


@dataclass(frozen=True, slots=True)
class NewPod:
    """A worker pod to create, the reason for it, and the nodes that it must avoid."""

    slot: int
    attempt: int
    cause: ReplacementCause
    why: str
    notes: dict[str, str]
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlowPod:
    """A rank that is confirmed to be slow, its pod, and the action that applies to it."""

    rank: RankStatus
    pod: Pod
    slowdown_percent: int
    since_s: float
    action: StragglerResponse


@dataclass(frozen=True, slots=True)
class Stuck:
    """Pods that cannot start, or of which a container cannot, for the same reason."""

    pods: tuple[str, ...]
    why: str
    """Words of the kubelet or of the scheduler."""
    unschedulable: bool = False

    @property
    def message(self) -> str:
        """The pods and the reason, for people."""
        more = f" and {len(self.pods) - NAMED_MAX} more" if len(self.pods) > NAMED_MAX else ""
        return f"{', '.join(self.pods[:NAMED_MAX])}{more}: {self.why}"


@dataclass(slots=True)
class PodPlan:
    """Worker pods of one decision; the later steps of the same decision modify it."""

    living: list[Pod] = field(default_factory=list)
    """Workers that count: they have not ended, are not being deleted, and are not lost."""
    new: list[NewPod] = field(default_factory=list)
    delete: list[Delete] = field(default_factory=list)
    losses: dict[str, str] = field(default_factory=dict)
    """Reasons why pods count as gone with their node, by uid."""
    waiting: list[str] = field(default_factory=list)
    """Reasons why slots stay empty for now."""
    no_fabric: str = ""
    """Reason why no pod can be made: no fabric profile fits; empty if one does."""
    surplus: int = 0
    """Number of workers above the target; the coordinator chooses and drains them."""
    slow: tuple[SlowPod, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    """Pods whose containers wait for a minute, by what they wait for."""
    clocks: Clocks = field(default_factory=Clocks)
    replaced: int = 0
    """Pods replaced so far, including those in `new`."""
    looks: list[float] = field(default_factory=list)
    """Times at which a decision could change although nothing else has."""
    hurry: bool = False
    """True if news of the coordinator is wanted at once."""

    def look(self, at_s: float | None) -> None:
        """Request another decision at this time; None requests nothing."""
        if at_s is not None:
            self.looks.append(at_s)

    def drop_new(self) -> None:
        """Remove all new pods from the plan for now."""
        self.keep_new(0)

    def keep_new(self, count: int) -> None:
        """Remove all but the first `count` new pods from the plan for now."""
        self.replaced -= sum(new.cause is not ReplacementCause.NEW for new in self.new[count:])
        self.new = self.new[:count]

    def drop_growth(self) -> None:
        """Remove new pods that enlarge the job from the plan; replacements stay."""
        self.new = [new for new in self.new if new.cause is not ReplacementCause.NEW]

    def keep_running(self, **clocks: Any) -> None:
        """Set clocks, given by the names of their fields in `Clocks`."""
        self.clocks = replace(self.clocks, **clocks)
