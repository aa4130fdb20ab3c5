"""Start times of states, for decisions that require a state to last.

Each decision returns the clocks that continue to run. A clock that it leaves out starts again the
next time the state is observed. Times are seconds of the operator's wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CarrierUnknown:
    """Start of a period in which rounds run between two pods over an unknown carrier."""

    since_s: float
    since_round: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """All clocks of one job; None means that the job is not in that state."""

    nobody_s: float | None = None
    """No pod of the job may have a process."""
    coordinator_away_s: float | None = None
    """The present coordinator has not reported; before the job's start, only if its pod runs."""
    surplus_s: float | None = None
    """There are more workers than the target."""
    ending_s: float | None = None
    """The last round is committed (R17), as some coordinator of the job has reported."""
    stopping_s: float | None = None
    """A job that is to be suspended was asked for its last round."""
    carrier_unknown: CarrierUnknown | None = None
    node_missing_s: Mapping[str, float] = field(default_factory=dict)
    """Times by name of a node that has a pod of the job and is missing from the watch of nodes."""
    waits_s: Mapping[str, float] = field(default_factory=dict)
    """Times by uid of a pod that has started, since which one of its containers waits."""
    slow_s: Mapping[str, float] = field(default_factory=dict)
    """Times by rank (decide/stragglers.py) since which it is slower than the others."""
