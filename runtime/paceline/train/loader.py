"""`DataLoader`: torch's loader over leases that the job deals, so that each sample counts once.

The ranks of a job share one order of the samples. Each rank loads the leases that it holds. Which
those are is a function of the round log, so a rank that dies or falls behind leaves its samples to
others (R14). `for epoch in loader.epochs(n)` follows the job: a rank that joins late starts at the
present epoch, and ranks may be one epoch apart (D8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset

from paceline.core.anatomy.samples import StepPhase
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import epoch_of, leases_per_epoch
from paceline.errors import DataError, UnsupportedError, UsageError
from paceline.train.context import Context, JobOptimizer, current
from paceline.train.contribution import LeaseBatch
from paceline.train.leases import LeaseSampler

T = TypeVar("T")

LEASES_IN_HAND = 2
"""Number of leases that a rank needs without prefetching: one in flight, and the next one (R14)."""
PREFETCH_FACTOR = 2
"""Batches that each worker loads ahead: torch's own default."""
REFUSED = {
    "shuffle": "the order is one keyed permutation for all ranks; choose another with seed=",
    "sampler": "the job deals the samples; wrap the data set to leave some out or repeat them",
    "batch_sampler": "the job deals the samples; say batch_size= and accumulate=",
}
"""Arguments of torch's loader that a job cannot honor, each with a hint."""


class DataLoader(torch.utils.data.DataLoader[T]):
    """A torch DataLoader whose batches come from the leases of this rank.

    Use it on the main thread only.

    Args:
        dataset: A data set with `__len__` and `__getitem__`.
        batch_size: Number of samples of one batch on one rank.
        accumulate: Number of batches that make one optimizer step. Call `step()` after each batch.
        seed: Seed of the order of the samples; it must be equal on all ranks.
        drop_last: True to leave out the last step of an epoch if it would be smaller than the
            others.
        num_workers: As in torch.
        prefetch_factor: As in torch.
        persistent_workers: As in torch, but the default is True where there are workers.
        in_order: As in torch; False is refused, because batches could not be told apart.
        collate_fn: As in torch.
        options: Other arguments of torch's loader, such as `pin_memory`.

    Raises:
        UnsupportedError: An argument cannot be honored, or the data set is an IterableDataset.
        DataError: The data set is empty or has no length, or a number is not 1 or more.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int = 1,
        *,
        accumulate: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        in_order: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        for name, hint in REFUSED.items():
            if name in options:
                raise UnsupportedError(f"DataLoader({name}=...) is not supported", hint=hint)
        if not in_order:
            raise UnsupportedError(
                "DataLoader(in_order=False) is not supported: batches could not be told apart",
                hint="leave in_order out",
            )
        if isinstance(dataset, IterableDataset):
            raise UnsupportedError(
                "an IterableDataset cannot be dealt: it has no sample numbers",
                hint="use a data set with __len__ and __getitem__, or a loader of your own with "
                "optimizer.step(samples=...)",
            )
        _check_plan_values(dataset, batch_size, accumulate)
        self._leases = LeaseSampler()
        self._prefetch = num_workers * (prefetch_factor or PREFETCH_FACTOR)
        self._plan = DataPlan(
            samples=len(dataset),  # type: ignore[arg-type]
            batch=batch_size,
            accumulate=accumulate,
            seed=seed,
            drop_last=drop_last,
        )
        self._context: Context | None = None
        self._optimizer: JobOptimizer | None = None
        self._stream: Iterator[tuple[LeaseBatch, T]] = iter(())
        self._next: tuple[LeaseBatch, T] | None = None
        self._epoch = -1
        self._epoch_ended = True
        super().__init__(
            dataset,
            batch_sampler=self._leases,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            # Starting workers again after each wait for leases would cost more than they load.
            persistent_workers=num_workers > 0
            if persistent_workers is None
            else persistent_workers,
            in_order=in_order,
            collate_fn=collate_fn,
            **options,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from the job's present one on, until the job is over.

        The first iteration starts training and blocks until this rank is a member. When the loop
        runs to its end, the final weights are in the model and the coordinator has released the job
        (D7). Leaving the loop over the batches of an epoch early drops what this rank would get of
        the rest. A second call raises UsageError; a data set that is too small for the ranks raises
        DataError.

        Args:
            count: Number of epochs that the job makes, 1 or more.

        Yields:
            The number of the present epoch, from 0.
        """
        optimizer, context = self._start(count)
        self._stream = self._all_batches(context, optimizer)
        try:
            while (batch := self._peek()) is not None:
                # A lease of an earlier epoch may be dealt again (R14). It counts with this epoch.
                present = max(epoch_of(self._plan, batch.lease), self._epoch + 1)
                self._epoch = min(present, count - 1)
                self._epoch_ended = False
                yield self._epoch
                optimizer.builder.settle()
                if not self._epoch_ended:
                    optimizer.builder.abandon()
                    self._leases.leave(self._epoch)
        finally:
            self._end_workers()
        self._leases.rests()
        context.finish()

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        """Yield the batches of this rank in the present epoch.

        `next(iter(loader))` only looks: the next loop begins with the same batch. The batch counts
        once, if the script makes a step of it then.

        Yields:
            A batch, as torch's loader makes it.

        Raises:
            UsageError: The loop is not inside a loop over `epochs()`.
            GeneratorExit: The script has left the loop early (raised again).
        """
        if self._optimizer is None or self._epoch < 0:
            raise UsageError(
                "a loop over pl.DataLoader outside of epochs()",
                hint="write: for epoch in loader.epochs(10): for batch in loader: ...",
            )
        assert self._context is not None
        builder = self._optimizer.builder
        looks = True
        while True:
            builder.settle()
            batch = self._peek()
            if batch is None or epoch_of(self._plan, batch.lease) > self._epoch:
                self._epoch_ended = True
                self._leases.rests()
                # Code after the loop must see the effect of every step of the loop.
                self._context.session.flush()
                self._optimizer.after_parking()
                return
            assert self._next is not None
            taken, self._next = self._next, None
            builder.take(batch)
            self._leases.takes(batch)
            try:
                yield taken[1]
            except GeneratorExit:
                if looks and builder.put_back():
                    self._next = taken
                raise
            looks = False

    def __len__(self) -> int:
        """Return the nominal number of batches per epoch and rank.

        Returns:
            The number that each rank would get if all were equally fast.
        """
        steps = leases_per_epoch(self._plan)
        return -(-steps // max(1, current("len(loader)").session.size)) * self._plan.accumulate

    def _start(self, count: int) -> tuple[JobOptimizer, Context]:
        context = current("loader.epochs()")
        optimizer = context.need_optimizer("loader.epochs()")
        if optimizer.started:
            raise UsageError(
                "loader.epochs() after training had started",
                hint="one loader and one loop over epochs() per job; call it before any step()",
            )
        if count < 1:
            raise DataError(f"epochs({count})", hint="train for 1 epoch or more")
        plan = DataPlan(
            samples=self._plan.samples,
            batch=self._plan.batch,
            accumulate=self._plan.accumulate,
            epochs=count,
            seed=self._plan.seed,
            drop_last=self._plan.drop_last,
        )
        _check_size(plan, 1)
        self._plan, self._context, self._optimizer = plan, context, optimizer
        self._leases.bind(context.session, plan)
        optimizer.start(plan, LEASES_IN_HAND + -(-self._prefetch // plan.accumulate))
        # Only at the start: a job that grows later may have ranks without work.
        if context.session.version == 0:
            _check_size(plan, context.session.size)
        return optimizer, context

    def _all_batches(
        self, context: Context, optimizer: JobOptimizer
    ) -> Iterator[tuple[LeaseBatch, T]]:
        """Yield every batch of torch's loader, for the whole job; wait for leases in between.

        Yields:
            The batch's place in its lease, and its data.
        """
        session = context.session
        while not session.stopped:
            for data in super().__iter__():
                yield self._leases.handed_out(), data
                if session.stopped:
                    return
            # The sampler has run dry. Everything that was pulled has been handed out, and the loop
            # settles a batch before it asks for the next one. So nothing is unfinished here (D1).
            if not session.wait_lease():
                return
            optimizer.after_parking()

    def _end_workers(self) -> None:
        # The stream refers to this loader. The garbage collector would close the queues first, and
        # each worker would then take 5 s to notice.
        self._stream, self._next = iter(()), None
        self._iterator = None

    def _peek(self) -> LeaseBatch | None:
        """Return the batch that comes next; None when the job is over.

        The batch is checked at each call, because it may lose its lease while it waits
        (`pl.evaluating`, R13).

        Returns:
            The batch, whose data is in `self._next`.
        """
        assert self._context is not None
        assert self._optimizer is not None
        session, builder = self._context.session, self._optimizer.builder
        while not session.stopped:
            if self._next is None:
                session.enters(StepPhase.LOADING)
                self._leases.loads()
                self._next = next(self._stream, None)
                session.enters(StepPhase.SCRIPT)
                if self._next is None:
                    return None
            batch = self._next[0]
            if builder.accepts(batch):
                if not (batch.first and self._leases.has_left(batch.lease)):
                    return batch
                session.skip(batch.lease, batch.lease_samples)
            self._next = None
        return None


def _check_size(plan: DataPlan, ranks: int) -> None:
    steps = leases_per_epoch(plan)
    if steps < ranks:
        raise DataError(
            f"{plan.samples} samples make {steps} steps of {plan.batch * plan.accumulate}, for "
            f"{ranks} ranks: some would never get one",
            hint="use a smaller batch_size or accumulate, fewer ranks, or drop_last=False",
        )


def _check_plan_values(dataset: Dataset[Any], batch_size: int, accumulate: int) -> None:
    try:
        samples = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"the data set {type(dataset).__name__} has no length",
            hint="give it a __len__, so that its samples can be dealt",
        ) from None
    if samples == 0:
        raise DataError("the data set is empty", hint="check the path that it reads from")
    for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{name}={value!r}", hint="give a whole number, 1 or more")
