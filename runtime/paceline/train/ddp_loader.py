"""Loader of a DDP script, over leases: `for epoch in range(n): for batch in loader` as before.

The script counts its epochs itself. The n-th loop over the loader is epoch n. On a rank that joins
late, the loops of past epochs give nothing. The end of the last loop is the end of the job. A loop
that is dropped after a look at one batch (`next(iter(loader))`) does not count as an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from paceline.errors import UnsupportedError, UsageError
from paceline.train.loader import DataLoader

T = TypeVar("T")

KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "in_order",
)
"""Arguments that the script's loader passes on to ours."""


def adopt(
    loader: torch.utils.data.DataLoader[T], *, epochs: int, accumulate: int
) -> ScriptLoader[T]:
    """Return a loader with the same data in batches of the same size, dealt by the job.

    Args:
        loader: The script's loader of the training data.
        epochs: Number of loops that the script makes over it.
        accumulate: Number of batches per `step()`.

    Returns:
        The loader that the script uses instead.

    Raises:
        UsageError: It is not a torch DataLoader, or one of ours.
        UnsupportedError: Its sampler does not take each sample exactly once.
    """
    if not isinstance(loader, torch.utils.data.DataLoader) or isinstance(loader, DataLoader):
        raise UsageError(
            f"pl.ddp() got a {type(loader).__name__} as loader",
            hint="hand over the torch DataLoader of the training data; a script with pl.DataLoader "
            "needs pl.DistributedOptimizer and the plain model",
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UnsupportedError(
            "the loader has a batch sampler of its own, or makes no batches",
            hint="say DataLoader(dataset, batch_size=...): the job deals the samples",
        )
    sampler = loader.sampler
    if not _takes_each_once(sampler):
        raise UnsupportedError(
            f"the loader has a {type(sampler).__name__}, which does not take each sample once",
            hint="wrap the data set to leave samples out or to repeat them: the job deals them",
        )
    return ScriptLoader(
        loader.dataset,
        loader.batch_size,
        epochs=epochs,
        script_sampler=sampler,
        accumulate=accumulate,
        seed=getattr(sampler, "seed", 0),
        drop_last=loader.drop_last,
        **{name: getattr(loader, name) for name in KEPT},
    )


def _takes_each_once(sampler: object) -> bool:
    if isinstance(sampler, RandomSampler):
        whole = sampler.num_samples == len(sampler.data_source)
        return not sampler.replacement and whole
    return isinstance(sampler, DistributedSampler | SequentialSampler)


class ScriptLoader(DataLoader[T]):
    """Loader that `pl.ddp` returns in place of the script's own.

    Args:
        dataset: The data set of the script's loader.
        batch_size: Number of samples of one batch on one rank.
        epochs: Number of loops that the script makes.
        script_sampler: The sampler of the script's loader, which the script may still use.
        options: Further arguments of `pl.DataLoader`.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, epochs: int, script_sampler: Any, **options: Any
    ) -> None:
        self._script_sampler, self._script_batch_size = script_sampler, batch_size
        self._count = epochs
        self._loops = 0
        self._steps: Iterator[int] | None = None
        self._present: int | None = -1
        """Present epoch of this rank; None when the job is over."""
        super().__init__(dataset, batch_size, **options)

    @property
    def sampler(self) -> Any:
        """Sampler of the script, which calls its `set_epoch()`; the job decides the order."""
        return self._script_sampler

    @sampler.setter
    def sampler(self, _: Any) -> None:
        """Ignore the sampler that torch sets: batches come from the leases."""

    @property
    def batch_size(self) -> int:
        """Number of samples of one batch on one rank, as in the script's loader."""
        return self._script_batch_size

    @batch_size.setter
    def batch_size(self, _: Any) -> None:
        """Ignore the value that torch sets: batches come from the leases."""

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        """Yield the batches of this rank in the epoch of this loop.

        The first loop starts training. The last one ends when the final weights are in the model.

        Yields:
            A batch, as torch's loader makes it.

        Raises:
            GeneratorExit: The script has left the loop early (raised again).
        """
        epoch, self._loops = self._loops, self._loops + 1
        if self._steps is None:
            self._steps = self.epochs(self._count)
        self._go_on_to(epoch)
        if self._present == epoch:
            try:
                yield from super().__iter__()
            except GeneratorExit:
                if self._looked:
                    self._loops = epoch  # a look does not count as an epoch
                raise
            # Also after the last epoch, so that the script saves and evaluates the final weights.
            self._go_on_to(epoch + 1)

    def _go_on_to(self, epoch: int) -> None:
        assert self._steps is not None
        while self._present is not None and self._present < epoch:
            self._present = next(self._steps, None)
