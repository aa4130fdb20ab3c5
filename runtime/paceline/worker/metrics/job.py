"""A rank's metrics about the whole job: its progress, and the figures that the script logs.

All ranks know the same (R42), so only the lowest active one exports these metrics. Communication
thread only.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.status import Fact
from paceline.telemetry.catalog import FIGURE_NAME_BYTES, FIGURES_MAX
from paceline.telemetry.records import Gauge, RankRecord


class JobMetrics:
    """Handles in one rank's record; a figure of the script gets its place at its first report."""

    def __init__(self, record: RankRecord) -> None:
        self._record = record
        self._facts = {
            Fact.PROGRESS: record.gauge("paceline_progress_ratio"),
            Fact.EPOCH: record.gauge("paceline_epoch_number"),
            Fact.LEFT_S: record.gauge("paceline_remaining_seconds"),
        }
        self._figures: dict[str, tuple[Gauge, Gauge]] = {}
        """Handles for sum and weight by name, for as many figures as there is space for."""

    def tell(self, facts: Mapping[str, float], logged: Mapping[str, tuple[float, float]]) -> None:
        """Export progress and the script's figures.

        Args:
            facts: Computed facts; a fact that is missing is cleared.
            logged: For each of the script's names, the sum of value x weight and the sum of
                weights.
        """
        for fact, gauge in self._facts.items():
            if fact in facts:
                gauge.set(facts[fact])
            else:
                gauge.clear()
        for name, (total, weight) in logged.items():
            figure = self._figure(name)
            if figure is not None:
                figure[0].set(total)
                figure[1].set(weight)

    def be_silent(self) -> None:
        """Clear all metrics, because another rank exports them."""
        for gauge in self._facts.values():
            gauge.clear()
        for figure in self._figures.values():
            for gauge in figure:
                gauge.clear()

    def _figure(self, name: str) -> tuple[Gauge, Gauge] | None:
        short = name.encode()[:FIGURE_NAME_BYTES].decode(errors="ignore")
        if short not in self._figures and len(self._figures) < FIGURES_MAX:
            number = len(self._figures)
            self._record.name_figure(number, short)
            self._figures[short] = (
                self._record.gauge("paceline_figure_number", figure=str(number)),
                self._record.gauge("paceline_figure_weight_number", figure=str(number)),
            )
        return self._figures.get(short)
