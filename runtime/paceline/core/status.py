"""Names of the figures that a rank measures about itself and sends with its heartbeats."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from paceline_api import status

METRIC_ROUNDS: Final = 32
"""Number of rounds over which the means of the script's own metrics are taken."""


class Fact(StrEnum):
    """Names of the figures that a rank measures about itself.

    All values are numbers; totals grow from the rank's start. The figures of the round log are the
    fields of `LogStatus`; `core.log_figures` derives their names.
    """

    STEP_S = status.STEP_S
    """Median of its recent steps: from the return of step() until the next gradient is announced.
    """
    LAG_S = status.LAG_S
    """Median time of its recent arrivals after the first rank of the same round."""
    WAIT_S = "wait_seconds_total"
    """Time that its main thread was parked in step(), waiting for other ranks and for the
    reduction."""
    EPOCH = "epoch"
    """Epochs done so far, including the completed part of the present one. From the log, so only
    the lowest active rank reports it."""

    GIVEN_UP = "given_up."
    """+ reason: number of streamed rounds that this rank aborted."""

    CARRIED = "carried."
    """+ transport: number of size classes of buffers that it moves, chosen when the channel was
    opened."""

    SAVES = "checkpoints_"
    """+ result: number of checkpoints. The three results are listed next."""
    SAVED = "checkpoints_written"
    """Number of checkpoints that this rank wrote."""
    SAVED_VERSION = "checkpoint_version"
    """Version of the last checkpoint that it published."""
    SAVE_FAILED = "checkpoints_failed"
    """Number of checkpoints that it could not write."""
    SAVE_SKIPPED = "checkpoints_skipped"
    """Number of checkpoints that were due while the one before was still being written."""
    SAVE_EXPOSED_S = "checkpoint_exposed_seconds"
    """Time that its communication thread spent on copying the state."""
    SAVE_HIDDEN_S = "checkpoint_hidden_seconds"
    """Time spent on writing the copies while training went on."""

    # Only in a run that `paceline plan` measures: means over rounds that wait for all ranks.
    OWN_BATCH = "gradient_samples"
    """Samples in a gradient of this rank."""
    OWN_SQUARE = "gradient_square"
    """Squared norm of a gradient of this rank."""
    MEAN_BATCH = "mean_gradient_samples"
    """Samples in an update."""
    MEAN_SQUARE = "mean_gradient_square"
    """Squared norm of the mean gradient over all ranks."""
