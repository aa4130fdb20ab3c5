"""A rank's metrics about the whole job: its progress, and the figures that the script logs.

All ranks know the same (R42), so only the lowest active one exports these metrics. Communication
thread only.
"""

from __future__ import annotations

from paceline_api.status import LogStatus, as_number

from paceline.core.anatomy.samples import FIGURE_NAME_BYTES, FIGURES_MAX
from paceline.telemetry.records import Gauge, RankRecord


class JobMetrics:
    """Handles in one rank's record; a figure of the script gets its place at its first report."""

    def __init__(self, record: RankRecord) -> None:
        self._record = record
        self._progress = record.gauge("paceline_progress_ratio")
        self._epoch = record.gauge("paceline_epoch_number")
        self._left_s = record.gauge("paceline_remaining_seconds")
        self._figures: dict[str, tuple[Gauge, Gauge]] = {}
        """Handles for sum and weight by name, for as many figures as there is space for."""

    def export(self, log: LogStatus, epoch: float | None) -> None:
        """Export progress and the script's figures.

        Args:
            log: What the round log says.
            epoch: Epochs done so far; None if that is unknown.
        """
        shown = (self._progress, log.progress), (self._epoch, epoch), (self._left_s, log.left_s)
        for gauge, value in shown:
            if value is not None:
                gauge.set(value)
            else:
                gauge.clear()
        for name, (total, weight) in log.metric_sums.items():
            figure = self._figure(name)
            if figure is not None:
                figure[0].set(as_number(total))
                figure[1].set(as_number(weight))

    def clear(self) -> None:
        """Clear all metrics, because another rank exports them."""
        for gauge in (self._progress, self._epoch, self._left_s):
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
