"""Squared norms of a rank's own gradients and of all ranks' mean, for the gradient noise scale.

The ratio of the second to the first shows how much of a gradient is noise
(`core.forecast.efficiency`). Used by the communication thread, only in a run that `paceline plan`
measures: each norm is a pass over all parameters, so most rounds are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Final

import torch

from paceline.core.protocol.composition import Weighing
from paceline.core.rank import events as ev
from paceline.core.status import Fact
from paceline.worker.state.gradients import Gradients
from paceline.worker.state.optimizer_binding import sum_of_squares

EVERY: Final = 4
"""Interval between two measured steps, in steps."""


class GradientSquares:
    """Means of both squared norms since the rank began."""

    def __init__(self) -> None:
        self._steps = 0
        self._own, self._mean = _Mean(), _Mean()

    def own(self, step: ev.Step, gradients: Gradients) -> None:
        """Measure this rank's gradient before it is reduced.

        GRAD must hold the announced gradient, in a round that waits for all ranks.

        Args:
            step: The announcement; only every EVERY-th is measured.
            gradients: Buffers of the gradient.
        """
        self._steps += 1
        if self._steps % EVERY or not (step.samples and step.finite):
            return
        scale = step.unit / step.samples
        self._own.add(step.samples, gradients.sum_of_squares() * scale * scale)

    def look(self, weighing: Weighing) -> Callable[[list[torch.Tensor]], None] | None:
        """Return what is to be called with the average of a round.

        Args:
            weighing: How the round becomes an update.

        Returns:
            A function that measures the average; None if this round is not measured.
        """
        whole = weighing.first and weighing.divisor * weighing.unit == weighing.samples
        if self._steps % EVERY or not whole:
            return None
        return partial(self._averaged, weighing.samples)

    def _averaged(self, samples: int, average: list[torch.Tensor]) -> None:
        self._mean.add(samples, sum_of_squares(average))

    def facts(self) -> dict[str, float]:
        """Return the means as facts; empty before both norms were measured."""
        own, mean = self._own, self._mean
        if not own.count or not mean.count:
            return {}
        return {
            Fact.OWN_BATCH: own.samples / own.count,
            Fact.OWN_SQUARE: own.square / own.count,
            Fact.MEAN_BATCH: mean.samples / mean.count,
            Fact.MEAN_SQUARE: mean.square / mean.count,
        }


class _Mean:
    def __init__(self) -> None:
        self.count = self.samples = 0
        self.square = 0.0

    def add(self, samples: int, square: float) -> None:
        if isfinite(square):
            self.count += 1
            self.samples += samples
            self.square += square
