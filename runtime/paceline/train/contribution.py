"""From batches to one contribution: what the main thread builds between two steps.

A contribution is the gradient of one lease, summed over its batches (D1, D3). Backward passes add
into GRAD by themselves; here stands what the numbers in GRAD mean. GRAD may hold more than the
contribution under construction: earlier ones that could not be announced yet (R11) stay in it, so
it is never simply erased.

    take(batch)     the loader hands a batch to the user; GRAD is brought to its unit first
    complete()      the user called `step()`: the batch's gradient is in
    settle()        the user takes the next batch instead, or leaves the loop
    put_back()      the user has dropped the loop after one look: the batch is handed out again
    discard()       the user's `zero_grad()` after a backward pass: what it has added is dropped,
                    and so is the batch, unless another backward pass follows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.core.protocol.pending import BufferName
from paceline.errors import UsageError
from paceline.worker.session import Session
from paceline.worker.state.gradients import Gradients


@dataclass(frozen=True, slots=True)
class Batch:
    """One of the batches that make a lease."""

    lease: int
    index: int
    count: int
    """Batches of the lease."""
    samples: int
    lease_samples: int

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class Contribution:
    """What `Session.step` announces."""

    leases: tuple[int, ...]
    samples: int
    unit: int


def _looked(what: str) -> UsageError:
    return UsageError(
        f"{what} for a batch whose loop over the loader was dropped",
        hint="next(iter(loader)) gives a batch to look at, and the loop after it gives it again; "
        "take the batches to train on in one loop: for batch in loader",
    )


def _erased() -> UsageError:
    return UsageError(
        "step() after zero_grad() had erased the gradient of this batch",
        hint="call zero_grad() before backward() or after step(); to drop a batch on purpose, "
        "leave out the step() for it",
    )


def _taken_ahead() -> UsageError:
    return UsageError(
        "the next batch was taken before step(), which counts for the batch that was taken last",
        hint="take it behind step(), as `for batch in loader` does; num_workers=1 or more loads "
        "ahead, and pin_memory=True makes the copy to a GPU overlap",
    )


class ContributionBuilder:
    """The contribution under construction. Main thread only.

    parts     what a batch leaves in GRAD is this part of its gradient: in a DDP script the
              gradients of all batches of a step add up to that of the step
    announce  for scripts whose own count decides when they call `step()`, which may come to differ
              from the lease's: the end of the lease counts, and is announced from `settle`
    """

    def __init__(
        self,
        session: Session,
        gradients: Gradients,
        *,
        mean: bool,
        parts: int = 1,
        announce: Callable[[Contribution], None] | None = None,
    ) -> None:
        self._session = session
        self._gradients = gradients
        self._mean = mean
        self._parts = parts
        self._announce = announce
        self._batch: Batch | None = None
        self._lease: Batch | None = None
        """The last batch taken of the lease that is neither announced nor skipped."""
        self._samples = 0
        """Of the lease's batches that are in GRAD."""
        self._pending_unit = 0
        """Unit of the earlier contributions that were in GRAD when the lease began; 0 = none."""
        self._forgotten = 0
        """Gradients that were discarded because the next batch was taken; see `complete`."""
        self._passed = False
        """The batch in hand was taken before a step was made of the one before."""
        self._left_out = False
        """Of some batch nothing was computed before the one after it was taken."""
        self._erased = False
        """`zero_grad()` has dropped what was computed of the batch in hand, or taken last."""
        self._unstepped = False
        """GRAD has batches of the lease for which no `step()` was called (see `settle`)."""
        self._put_back = False
        """The last batch was put back; what is computed of it now would count for another one."""
        self._self_fed_samples = 0

    def accepts(self, batch: Batch) -> bool:
        """False if the batch must not reach the user: its lease has been given to another rank, or
        the user has skipped an earlier batch of it."""
        if batch.first:
            return self._session.holds(batch.lease)
        return self._lease is not None and batch.lease == self._lease.lease

    def take(self, batch: Batch) -> None:
        """GRAD gets the unit of this batch before its gradient is computed (D3)."""
        assert self._batch is None, "settle the batch before"
        gradients = self._gradients
        if self._put_back and gradients.touched():
            raise _looked("backward()")
        self._put_back = False
        if batch.first:
            self._samples, self._pending_unit = 0, gradients.unit
        self._rescale(self._unit(batch))
        gradients.mark_untouched()
        self._erased = False
        self._batch = self._lease = batch
        if batch.last:
            samples = self._samples + batch.samples
            self._session.computing((batch.lease,), samples, self._unit(batch))

    def complete(self) -> Contribution | None:
        """The gradient of the batch is in GRAD; returns the contribution if it was the last one."""
        batch = self._batch
        if batch is None:
            if self._put_back:
                raise _looked("step()")
            if self._announce is not None:
                return None  # what it would announce went out at the end of its lease
            if self._erased:
                raise _erased()
            if self._left_out or self._forgotten == 1:
                raise _taken_ahead()
            raise UsageError(
                "step() without a batch",
                hint="call step() once for each batch that the loader gives",
            )
        if self._passed and self._forgotten < 2 and not self._gradients.touched():
            raise _taken_ahead()
        if self._forgotten:
            raise UsageError(
                "several batches were taken for one step()",
                hint="say DataLoader(..., accumulate=K), call step() after each backward() and do "
                "not divide the loss by K (with DDP: pl.ddp(..., accumulate=K)); or call "
                "zero_grad() to drop a batch on purpose",
            )
        if self._erased and not self._gradients.touched():
            raise _erased()
        self._passed = False
        self._finish(batch)
        self._unstepped = False
        if not batch.last:
            self._gradients.lay_by()
            return None
        contribution = Contribution((batch.lease,), self._samples, self._gradients.unit)
        self._lease, self._samples = None, 0
        return contribution

    def complete_self_fed(self, samples: int) -> Contribution:
        """Without our loader: whatever the gradient views hold is the contribution."""
        if self._mean and self._self_fed_samples not in (0, samples):
            # Late work that waits in GRAD is of the unit before, and by now they are one sum.
            raise UsageError(
                f"step(samples={samples}) after step(samples={self._self_fed_samples})",
                hint="use pl.DataLoader, or in a DDP script pl.ddp(model, optimizer, loader, "
                "epochs=...), which know each batch's size beforehand; without them a loss with "
                'reduction="sum" and pl.DistributedOptimizer(loss_reduction="sum")',
            )
        self._self_fed_samples = samples
        self._gradients.attach()
        self._gradients.unit = samples if self._mean else 1
        return Contribution((), samples, self._gradients.unit)

    def settle(self) -> None:
        """The user goes on without `step()` for the batch in hand."""
        batch = self._batch
        if batch is None or self._session.stopped:
            return
        if self._erased and not self._gradients.touched():
            self._skip()
            return
        touched, self._passed = self._gradients.touched(), True
        self._left_out |= not touched
        if touched and not self._gradients.detached():
            if not batch.last:
                self._finish(batch)  # step() once per lease is as good as once per batch
                self._unstepped = True
                return
            if self._announce is not None:
                contribution = self.complete()
                assert contribution is not None, "of the last batch"
                self._announce(contribution)
                return
        self._forgotten += touched
        self._skip()

    def put_back(self) -> bool:
        """Undo `take`, unless something was computed of the batch."""
        batch = self._batch
        if batch is None or self._erased or self._gradients.touched() or self._session.stopped:
            return False
        self._batch = None
        if batch.first:
            self._lease = None
            self._rescale(self._pending_unit)  # as the session knows it
        self._put_back = True
        return True

    def abandon(self) -> None:
        """The user leaves the epoch's loop, perhaps in the middle of a lease."""
        if self._lease is not None and not self._session.stopped:
            self._skip()

    def end(self) -> None:
        """The user ends the job: what is not announced of the lease in hand is dropped."""
        if not self.put_back():
            self.settle()
        self.abandon()

    def discard(self) -> None:
        """`zero_grad()`. After a backward pass: what it has added is dropped. The batch counts if
        another backward pass follows; else it is dropped with its lease. A lease of which earlier
        batches are in `p.grad` as well is dropped at once, since they cannot be told apart."""
        self._forgotten = 0
        if self._batch is None or not self._gradients.touched():
            self._gradients.attach()
        elif self._unstepped:
            self._erased = True
            self._skip()
        else:
            self._erased = True
            self._gradients.erase()

    def must_be_idle(self, why: str) -> None:
        """UsageError if a gradient has been computed and not announced."""
        if self._samples or (self._batch is not None and self._gradients.touched()):
            raise UsageError(
                f"{why} between backward() and step()", hint="call optimizer.step() first"
            )

    def poison(self) -> None:
        """Injected fault: the gradient under construction is not a number."""
        parameter = self._gradients.parameters[0]
        if parameter.grad is not None:
            parameter.grad.fill_(torch.nan)

    def _rescale(self, unit: int) -> None:
        """What is in GRAD becomes a sum / unit; equal units change no bit."""
        if self._gradients.unit not in (0, unit):
            self._gradients.scale(BufferName.GRAD, self._gradients.unit / unit)
            self._gradients.unit = unit

    def _unit(self, batch: Batch) -> int:
        """Of the gradient that the script computes from this batch."""
        return (batch.samples if self._mean else 1) * self._parts

    def _finish(self, batch: Batch) -> None:
        self._gradients.attach()
        self._gradients.unit = self._unit(batch)
        self._samples += batch.samples
        self._batch = None

    def _skip(self) -> None:
        """The whole lease is dropped: one that is applied in part could not be counted."""
        gradients, batch, mixed = self._gradients, self._lease, self._samples > 0
        assert batch is not None
        self._batch = self._lease = None
        self._samples = 0
        self._unstepped = False
        gradients.erase()
        if not mixed or not self._pending_unit:
            if mixed:
                gradients.zero(BufferName.GRAD)
            else:
                self._rescale(self._pending_unit)  # as the session knows it
            self._session.skip(batch.lease, batch.lease_samples)
            return
        # The lease's earlier batches are one sum with earlier contributions that wait in GRAD. They
        # cannot be taken apart: all of it is dropped, by announcing it as unusable, and is counted.
        self._session.step(
            leases=(batch.lease,),
            samples=batch.lease_samples,
            unit=gradients.unit,
            metrics=(),
            usable=False,
        )
