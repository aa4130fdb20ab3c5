"""Progress of a job as its scripts see it: the same on all ranks at the same version."""

from __future__ import annotations

from msgspec import Struct

from paceline.core.protocol.log import Log


class Progress(Struct, frozen=True):
    """Progress of the job at the moment of reading.

    Read it again in a loop: it does not change by itself.
    """

    step: int = 0
    """Number of steps that the job has made. One step is as many steps of single ranks as there are
    active ranks. In Full mode that is one round. Where a mode makes rounds with fewer ranks,
    more rounds make one step."""
    epoch: int = 0
    """Number of epochs of `pl.DataLoader` in which every sample was applied or dropped."""
    samples: int = 0
    """Number of samples that were applied. A script that feeds itself gives the samples of each
    step with `step(samples=)`."""


def progress_of(log: Log) -> Progress:
    """Return the progress that follows from a log."""
    ledger = log.ledger
    return Progress(
        step=int(log.steps),
        epoch=ledger.epochs_exact + ledger.epochs_short,
        samples=ledger.samples,
    )
