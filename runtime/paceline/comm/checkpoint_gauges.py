"""What checkpoints cost and what became of them: metrics, and figures for `status`.

Communication thread only. The counts are those of `core.rank.saving`; the seconds are measured.
"""

from __future__ import annotations

from functools import cache

from paceline.core.rank.state import Saving
from paceline.core.status import Fact
from paceline.telemetry.records import RankRecord


class CheckpointGauges:
    def __init__(self, record: RankRecord) -> None:
        self._version = record.gauge("paceline_checkpoint_rounds")
        self._exposed = record.counter("paceline_checkpoint_exposed_seconds_total")
        self._hidden = record.counter("paceline_checkpoint_hidden_seconds_total")
        self._results = cache(lambda r: record.counter("paceline_checkpoints_total", result=r))
        self._seen: dict[str, float] = {}

    def follow(self, saving: Saving, exposed_s: float, hidden_s: float) -> dict[str, float]:
        """Totals of this rank so far; returns them as facts."""
        facts: dict[str, float] = {
            Fact.SAVED: float(saving.written),
            Fact.SAVE_FAILED: float(saving.failed),
            Fact.SAVE_SKIPPED: float(saving.skipped),
            Fact.SAVE_EXPOSED_S: exposed_s,
            Fact.SAVE_HIDDEN_S: hidden_s,
        }
        self._exposed.add(exposed_s - self._seen.get(Fact.SAVE_EXPOSED_S, 0.0))
        self._hidden.add(hidden_s - self._seen.get(Fact.SAVE_HIDDEN_S, 0.0))
        results = {"written": Fact.SAVED, "failed": Fact.SAVE_FAILED, "skipped": Fact.SAVE_SKIPPED}
        for result, fact in results.items():
            if more := facts[fact] - self._seen.get(fact, 0.0):
                self._results(result).add(more)
        if saving.published is not None:
            self._version.set(float(saving.published))
            facts[Fact.SAVED_VERSION] = float(saving.published)
        self._seen = facts
        return facts
