"""Construction of one contribution from batches, on the main thread, between two steps.

A contribution is the gradient of one lease, summed over its batches (D1, D3). Backward passes add
into the buffer GRAD by themselves; this module tracks what the numbers in GRAD mean. GRAD may hold
more than the contribution under construction: earlier contributions that could not be announced yet
stay in it (R11). It is therefore never simply erased.

    take(batch)   The loader hands a batch to the user. GRAD is converted to the batch's unit first.
    complete()    The user called `step()`: the gradient of the batch is in GRAD.
    settle()      The user takes the next batch without a `step()`, or leaves the loop.
    put_back()    The user dropped the loop after looking at one batch. It is handed out again.
    discard()     The user called `zero_grad()` after a backward pass. What that pass added is
                  dropped, and the batch too, unless another backward pass follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.core.protocol.pending import BufferName
from paceline.errors import UsageError
from paceline.worker.session import Session
from paceline.worker.state.gradients import Gradients


@dataclass(frozen=True, slots=True)
class LeaseBatch:
    """One of the batches that make a lease."""

    lease: int
    index: int
    count: int
    """Number of batches in the lease."""
    samples: int
    lease_samples: int

    @property
    def first(self) -> bool:
        """Return True if no batch of the lease comes before this one."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Return True if this batch completes its lease."""
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class Contribution:
    """Leases, samples and unit of the gradient that `Session.step` announces."""

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
    """Builder of the contribution of the present lease. Main thread only.

    Args:
        session: The session that owns the leases and counts skipped ones.
        gradients: The buffers that backward() adds to.
        mean: True if the loss of a batch is a mean over its samples, False if it is a sum.
    """

    def __init__(self, session: Session, gradients: Gradients, *, mean: bool) -> None:
        self._session = session
        self._gradients = gradients
        self._mean = mean
        self._batch: LeaseBatch | None = None
        self._lease: LeaseBatch | None = None
        """Last batch taken of the lease that is neither announced nor skipped."""
        self._samples = 0
        """Samples of the lease's batches that are in GRAD."""
        self._pending_unit = 0
        """Unit of the earlier contributions that were in GRAD when the lease began; 0 = none."""
        self._forgotten = 0
        """Number of gradients discarded because the next batch was taken; see `complete`."""
        self._passed = False
        """True if the script took the batch in hand before `step()` for the previous one."""
        self._left_out = False
        """True if the script took a batch, computed nothing of it, and took the next one."""
        self._erased = False
        """True if `zero_grad()` has dropped what was computed of the batch that was taken last."""
        self._unstepped = False
        """True if GRAD has batches of the lease without a `step()` call (see `settle`)."""
        self._put_back = False
        """True if the last batch was put back. What is computed of it now would count for another
        batch."""
        self._self_fed_samples = 0

    def accepts(self, batch: LeaseBatch) -> bool:
        """Return True if the batch may be handed to the user.

        It may not if its lease was given to another rank, or if the user skipped an earlier batch
        of the lease.
        """
        if batch.first:
            return self._session.holds(batch.lease)
        return self._lease is not None and batch.lease == self._lease.lease

    def take(self, batch: LeaseBatch) -> None:
        """Convert GRAD to the unit of this batch before its gradient is computed (D3)."""
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
        """Count the batch in hand as computed; return the contribution if the lease is complete."""
        batch = self._batch
        if batch is None:
            if self._put_back:
                raise _looked("step()")
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
                "not divide the loss by K; or call zero_grad() to drop a batch on purpose",
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
        """Return a contribution of what the gradient views hold, for a script without our loader.

        Args:
            samples: Number of samples of the batch.

        Returns:
            A contribution without leases.

        Raises:
            UsageError: The loss is a mean and the batch size differs from that of the step before.
        """
        if self._mean and self._self_fed_samples not in (0, samples):
            # Late work in GRAD has the earlier unit, and both are one sum by now.
            raise UsageError(
                f"step(samples={samples}) after step(samples={self._self_fed_samples})",
                hint="use pl.DataLoader, which knows each batch's size beforehand; without it a "
                'loss with reduction="sum" and pl.DistributedOptimizer(loss_reduction="sum")',
            )
        self._self_fed_samples = samples
        self._gradients.attach()
        self._gradients.unit = samples if self._mean else 1
        return Contribution((), samples, self._gradients.unit)

    def settle(self) -> None:
        """Handle a batch in hand for which the user has not called `step()`."""
        batch = self._batch
        if batch is None or self._session.stopped:
            return
        if self._erased and not self._gradients.touched():
            self._skip()
            return
        touched, self._passed = self._gradients.touched(), True
        self._left_out |= not touched
        if touched and not self._gradients.detached() and not batch.last:
            self._finish(batch)  # one step() per lease counts like one per batch
            self._unstepped = True
            return
        self._forgotten += touched
        self._skip()

    def put_back(self) -> bool:
        """Undo `take`, unless something was computed of the batch.

        Returns:
            True if the batch was put back and will be handed out again.
        """
        batch = self._batch
        if batch is None or self._erased or self._gradients.touched() or self._session.stopped:
            return False
        self._batch = None
        if batch.first:
            self._lease = None
            self._rescale(self._pending_unit)  # the unit that the session has recorded
        self._put_back = True
        return True

    def abandon(self) -> None:
        """Drop the unfinished lease, if there is one: the user has left the epoch's loop."""
        if self._lease is not None and not self._session.stopped:
            self._skip()

    def end(self) -> None:
        """Drop what is not announced of the lease in hand: the user ends the job."""
        if not self.put_back():
            self.settle()
        self.abandon()

    def discard(self) -> None:
        """Handle the script's `zero_grad()`: drop what the last backward pass has added.

        The batch counts if another backward pass follows; otherwise it is dropped with its lease.
        If earlier batches of the lease are in `p.grad` as well, they cannot be separated from this
        one, so the lease is dropped at once. Without a backward pass nothing is dropped.
        """
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
        """Check that no gradient has been computed that is not announced yet.

        Args:
            why: The call that needs this; it begins the error message.

        Raises:
            UsageError: There is such a gradient.
        """
        if self._samples or (self._batch is not None and self._gradients.touched()):
            raise UsageError(
                f"{why} between backward() and step()", hint="call optimizer.step() first"
            )

    def poison(self) -> None:
        """Fill the gradient of the first parameter with NaN; used by injected faults."""
        parameter = self._gradients.parameters[0]
        if parameter.grad is not None:
            parameter.grad.fill_(torch.nan)

    def _rescale(self, unit: int) -> None:
        """Convert GRAD to a sum divided by `unit`. If the unit is the same, no bit changes."""
        if self._gradients.unit not in (0, unit):
            self._gradients.scale(BufferName.GRAD, self._gradients.unit / unit)
            self._gradients.unit = unit

    def _unit(self, batch: LeaseBatch) -> int:
        """Return the unit of the gradient that the script computes from this batch (D3)."""
        return batch.samples if self._mean else 1

    def _finish(self, batch: LeaseBatch) -> None:
        self._gradients.attach()
        self._gradients.unit = self._unit(batch)
        self._samples += batch.samples
        self._batch = None

    def _skip(self) -> None:
        """Drop the whole lease: a lease that is applied in part could not be counted."""
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
                self._rescale(self._pending_unit)  # the unit that the session has recorded
            self._session.skip(batch.lease, batch.lease_samples)
            return
        # The lease's earlier batches and earlier contributions in GRAD are one sum, which cannot be
        # taken apart. All of it is announced as unusable, so that it is dropped and counted.
        self._session.step(
            leases=(batch.lease,),
            samples=batch.lease_samples,
            unit=gradients.unit,
            metrics=(),
            usable=False,
        )
