"""How far a job has come, as its scripts see it: the same on all ranks at equal version."""

from __future__ import annotations

from msgspec import Struct

from paceline.core.protocol.log import Log


class Progress(Struct, frozen=True):
    """How far the job is. Read it in a loop; it does not change by itself."""

    step: int = 0
    """Steps that the job has made: one is as many steps of single ranks as ranks train. In Full
    mode that is a round; where a mode makes rounds with fewer ranks, more rounds make one step."""
    epoch: int = 0
    """Epochs of `pl.DataLoader` of which every sample is applied or dropped."""
    samples: int = 0
    """Samples applied; a script that feeds itself says how many a step has, step(samples=)."""


def progress_of(log: Log) -> Progress:
    ledger = log.ledger
    return Progress(
        step=int(log.steps),
        epoch=ledger.epochs_exact + ledger.epochs_short,
        samples=ledger.samples,
    )
