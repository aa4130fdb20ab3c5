"""The figures of a job's rounds, as its statuses tell them while somebody follows it."""

from __future__ import annotations

from typing import Any, Final

from paceline.core.protocol.ledger import since
from paceline.core.status import LogStatus
from paceline.jobs.interface import JobStatus

ROWS_MAX: Final = 20_000
"""Beyond it every second row goes: a week of a job stays a table that can be drawn."""


class Figures:
    """One row for each round at which the job was seen; the latest word about a round counts."""

    def __init__(self) -> None:
        self._rows: list[tuple[dict[str, Any], LogStatus]] = []

    def add(self, status: JobStatus, wall_s: float) -> None:
        row = row_of(status, wall_s)
        if self._rows and self._rows[-1][0]["round"] == row["round"]:
            self._rows.pop()
        elif len(self._rows) >= ROWS_MAX:
            self._rows = self._rows[::2]
        self._rows.append((row, status.detail.log if status.detail is not None else LogStatus()))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows, the oldest first.

        A figure of the script is the mean over the rounds since the row before; in the first row
        over the last rounds before it."""
        found, before = [], LogStatus()
        for row, log in self._rows:
            figures = log.metrics
            if before.metric_sums:
                sums = since(log.metric_sums, before.metric_sums)
                figures = {name: total / n for name, (total, n) in sums.items() if n > 0}
            # A figure of the script that is called as one of ours stays apart from it.
            own = {f"{name}_" if name in row else name: value for name, value in figures.items()}
            found.append(row | own)
            before = log
        return found


def row_of(status: JobStatus, wall_s: float) -> dict[str, Any]:
    """What is not known on this back end is left out, so that no 0 is taken for a measurement."""
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
    return row | {"wait_avoided_s": log.avoided_s}
