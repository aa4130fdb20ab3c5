"""Since when things are as they are, for decisions that wait for them to last.

Each decision gives back the clocks that go on running; one that it leaves out begins anew when the
thing is seen the next time. Times are seconds of the operator's wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CarrierUnknown:
    """Rounds run between two pods, and nobody knows what carries them."""

    since_s: float
    since_round: int


@dataclass(frozen=True, slots=True)
class Clocks:
    nobody_s: float | None = None
    """No pod of the job may have a process any more."""
    coordinator_away_s: float | None = None
    """The present coordinator has not spoken; before a start, although its pod runs."""
    surplus_s: float | None = None
    """There are more workers than are wanted."""
    ending_s: float | None = None
    """The last round is made (R17), as some coordinator of the job has told."""
    stopping_s: float | None = None
    """A job to be suspended was asked for its last round."""
    carrier_unknown: CarrierUnknown | None = None
    node_missing_s: Mapping[str, float] = field(default_factory=dict)
    """By name: a node with a pod of the job that the watch of nodes does not show."""
    slow_s: Mapping[str, float] = field(default_factory=dict)
    """By rank (decide/stragglers.py): slower than the others."""
