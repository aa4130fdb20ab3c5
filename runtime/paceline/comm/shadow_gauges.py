"""What Shadow reports (`core.shadow`), written into the rank's record round by round.

The log's report is of the whole job; a record counts what its rank saw, so that a rank that is
started again in its place does not count the rounds before it twice.
"""

from __future__ import annotations

from paceline.core.shadow import PARTIAL, Hindsight, ShadowReport
from paceline.telemetry.records import RankRecord

US_PER_S = 1e6


class ShadowGauges:
    """Communication thread only; made when a round has run in Shadow."""

    def __init__(self, record: RankRecord) -> None:
        counter = record.counter
        self._waited_s = counter("paceline_shadow_waited_seconds_total")
        self._saved_s = {m: counter("paceline_shadow_saved_seconds_total", mode=m) for m in PARTIAL}
        self._late = {m: counter("paceline_shadow_late_gradients_total", mode=m) for m in PARTIAL}
        self._seen: ShadowReport | None = None

    def follow(self, report: ShadowReport) -> None:
        """After each round in Shadow. The first one seen is where counting begins."""
        seen, self._seen = self._seen, report
        if seen is None:
            return
        self._waited_s.add((report.waited_us - seen.waited_us) / US_PER_S)
        for mode, now in report.modes.items():
            before = seen.modes.get(mode, Hindsight())
            self._saved_s[mode].add((now.saved_us - before.saved_us) / US_PER_S)
            self._late[mode].add(now.late - before.late)
