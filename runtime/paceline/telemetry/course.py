"""The course of a job since the agent has started, in bounded memory, for `paceline report`."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Final

from paceline_api.times import MS_PER_S

from paceline.core.anatomy.samples import MOMENTS_MAX, Moment
from paceline.telemetry.collector import Values

EVERY_S: Final = 1.0
"""Interval between two moments at first, in seconds. It doubles whenever the memory is full."""


class Course:
    """Keeps moments of a job, evenly spaced. All methods are called on one thread."""

    def __init__(self) -> None:
        self.every_s = EVERY_S
        """Interval until the next call of `add`, in seconds."""
        self._moments: list[Moment] = []

    def add(self, wall_s: float, ranks: Iterable[Values]) -> None:
        """Keep what the ranks know at this moment, if they have a round to report.

        When the memory is full, every other moment is dropped and the interval doubles.

        Args:
            wall_s: Unix time in seconds.
            ranks: Values of each living rank of the pod.
        """
        rounds = 0
        figures: dict[str, tuple[float, float]] = {}
        for values in ranks:
            rounds = max(rounds, int(values.get(("paceline_committed_rounds", ()), (0.0,))[0]))
            figures |= _figures(values)
        if not rounds:
            return
        self._moments.append(Moment(int(wall_s * MS_PER_S), rounds, figures))
        if len(self._moments) > MOMENTS_MAX:
            del self._moments[1::2]
            self.every_s *= 2

    def moments(self) -> tuple[Moment, ...]:
        """Return what was kept, in order of time."""
        return tuple(self._moments)


def _figures(values: Values) -> dict[str, tuple[float, float]]:
    figures = {}
    for (metric, labels), (total, *_) in values.items():
        if metric == "paceline_figure_number":
            weight = values.get(("paceline_figure_weight_number", labels), (0.0,))[0]
            if isfinite(total) and isfinite(weight):
                figures[labels[0]] = (total, weight)
    return figures
