"""Table of a job's figures over its rounds, collected from its statuses."""

from __future__ import annotations

from typing import Any, Final

from paceline_api.status import LogStatus, as_number

from paceline.core.protocol.ledger import since
from paceline.jobs.interface import JobStatus

ROWS_MAX: Final = 20_000
"""Upper bound on the rows. When it is reached, every second row is dropped, so that the table of a
job that runs for a week can still be drawn."""


class Figures:
    """Table with one row for each round at which a status was received; the latest one counts."""

    def __init__(self) -> None:
        self._rows: list[tuple[dict[str, Any], LogStatus]] = []

    def add(self, status: JobStatus, wall_s: float) -> None:
        """Add a status, received at Unix time `wall_s`; replace the row of the same round."""
        row = row_of(status, wall_s)
        if self._rows and self._rows[-1][0]["round"] == row["round"]:
            self._rows.pop()
        elif len(self._rows) >= ROWS_MAX:
            self._rows = self._rows[::2]
        self._rows.append((row, status.detail.log if status.detail is not None else LogStatus()))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows, the oldest first.

        A figure of the script is its mean over the rounds since the row before. In the first row it
        is the mean that the status contains, over the last rounds before it.

        Returns:
            Rows of column names and values. The rows may have different columns.
        """
        table, before = [], LogStatus()
        for row, log in self._rows:
            figures = {name: as_number(value) for name, value in log.metrics.items()}
            if before.metric_sums:
                sums = since(_numbers(log), _numbers(before))
                figures = {name: total / n for name, (total, n) in sums.items() if n > 0}
            # Rename a figure of the script that has the name of a built-in column.
            own = {f"{name}_" if name in row else name: value for name, value in figures.items()}
            table.append(row | own)
            before = log
        return table


def row_of(status: JobStatus, wall_s: float) -> dict[str, Any]:
    """Return the row of one status, without the figures of the script.

    A figure that this back end does not know is left out, so that no 0 looks like a measurement.

    Args:
        status: The status.
        wall_s: Unix time in seconds at which it was received.

    Returns:
        Column names and values.
    """
    row: dict[str, Any] = {
        "round": status.round,
        "wall_s": wall_s,
        "state": status.state,
        "replicas": status.replicas,
        "ready": status.ready,
        "progress": status.progress,
    }
    if status.rounds_per_s_now:
        row["rounds_per_s"] = status.rounds_per_s_now
    if status.detail is None:
        return row
    log = status.detail.log
    if log.gradients:
        row |= {
            "samples_applied": log.samples_applied,
            "samples_late": log.samples_late,
            "samples_dropped": sum(log.samples_dropped.values()),
            "updates": log.updates,
        }
    if log.round_s:
        row["round_s"] = log.round_s
    return row | {"wait_avoided_s": log.avoided_s or 0.0}


def _numbers(log: LogStatus) -> dict[str, tuple[float, float]]:
    return {name: (as_number(total), as_number(n)) for name, (total, n) in log.metric_sums.items()}
