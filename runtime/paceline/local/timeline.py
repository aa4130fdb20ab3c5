"""History of a run as the runner has received it, status by status; for the table and the summary.

A coordinator keeps no state across restarts, so its list of changes begins again then. Here the
lists are joined.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from paceline_api.ids import GenerationId, MemberId
from paceline_api.status import (
    HistoryEntry,
    MembershipChange,
    Status,
    StragglerStatus,
)
from paceline_api.times import NS_PER_S

SPEED_WINDOW_NS: Final = 5 * NS_PER_S
"""Length of the time window for the present speed."""


@dataclass(frozen=True, slots=True)
class ProgressPoint:
    """Progress of the job at one time."""

    at_ns: int
    version: int
    gradients: int
    progress: float | None


@dataclass(slots=True)
class Timeline:
    """Everything that the runner knows of a run so far; all rates are those of this run alone."""

    started_ns: int | None = None
    """Time of the first status with a generation that all its members had started."""
    first: ProgressPoint | None = None
    last: ProgressPoint | None = None
    """Last point at which the version grew."""
    gradients_before: int | None = None
    """Gradients that earlier runs of this job had applied, from the log; None: not reported yet."""
    changes: dict[GenerationId, MembershipChange] = field(default_factory=dict)
    stragglers: dict[MemberId, StragglerStatus] = field(default_factory=dict)
    """All ranks that were slow for long, each with its latest report."""
    _recent: deque[ProgressPoint] = field(default_factory=deque)
    _latest: tuple[str, int] = ("", 0)

    def add(self, status: Status, at_ns: int) -> list[HistoryEntry]:
        """Record one status.

        Args:
            status: The newest status.
            at_ns: Time of its arrival in ns.

        Returns:
            What has happened since the status before.
        """
        if self.started_ns is None and any(c.start_s is not None for c in status.changes):
            self.started_ns = at_ns
        log = status.log
        for change in status.changes:
            self.changes[change.generation] = change
        if log.gradients and self.gradients_before is None:
            self.gradients_before = log.gradients_before
        # In a resumed job these are 0 until the ranks have reported.
        version = max(status.version, self.version_before)
        gradients = max(log.gradients, self.gradients_before or 0)
        point = ProgressPoint(at_ns, version, gradients, log.progress)
        # A coordinator that has just restarted knows fewer rounds than were made.
        behind = self.last is not None and point.gradients < self.last.gradients
        if self.started_ns is not None and not behind:
            self.first = self.first or point
            if self.last is None or point.version > self.last.version:
                self.last = point
            self._recent.append(point)
            while at_ns - self._recent[0].at_ns > SPEED_WINDOW_NS:
                self._recent.popleft()
        for slow in status.stragglers:
            self.stragglers[slow.member] = slow
        return self._news(status)

    def _news(self, status: Status) -> list[HistoryEntry]:
        who, last = self._latest
        if who != status.coordinator:
            last = 0
        news = [happening for happening in status.history if happening.seq > last]
        self._latest = status.coordinator, max([last, *(h.seq for h in news)])
        return news

    def elapsed_ns(self, at_ns: int) -> int:
        """Return the time since the first generation in ns; 0 before it."""
        return 0 if self.started_ns is None else at_ns - self.started_ns

    @property
    def seconds(self) -> float:
        """Seconds from the first generation to the last round."""
        if self.first is None or self.last is None:
            return 0.0
        return (self.last.at_ns - self.first.at_ns) / NS_PER_S

    @property
    def version_before(self) -> int:
        """Version with which the run began: 0, or that of its checkpoint."""
        first = self.changes[min(self.changes)] if self.changes else None
        return first.version if first is not None and first.reason == "First" else 0

    @property
    def rounds_per_s(self) -> float:
        """Rounds per second of this run alone."""
        if self.first is None or self.last is None:
            return 0.0
        return self._per_s(self.last.version - max(self.version_before, self.first.version))

    @property
    def gradients_per_s(self) -> float:
        """Gradients per second that were applied in this run."""
        if self.first is None or self.last is None:
            return 0.0
        before = max(self.gradients_before or 0, self.first.gradients)
        return self._per_s(self.last.gradients - before)

    def _per_s(self, gained: int) -> float:
        return gained / self.seconds if self.seconds else 0.0

    @property
    def rounds_per_s_now(self) -> float:
        """Rounds per second in the latest SPEED_WINDOW_NS."""
        return _rate(*self._ends(), "version")

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the present speed; None if that is not known."""
        points = [point for point in self._recent if point.progress is not None]
        speed = _rate(points[0], points[-1], "progress") if points else 0.0
        return (1.0 - (points[-1].progress or 0.0)) / speed if speed else None

    def _ends(self) -> tuple[ProgressPoint | None, ProgressPoint | None]:
        return (self._recent[0], self._recent[-1]) if self._recent else (None, None)


def _rate(first: ProgressPoint | None, last: ProgressPoint | None, name: str) -> float:
    if first is None or last is None or last.at_ns <= first.at_ns:
        return 0.0
    gained: float = getattr(last, name) - getattr(first, name)
    return gained * NS_PER_S / (last.at_ns - first.at_ns)
