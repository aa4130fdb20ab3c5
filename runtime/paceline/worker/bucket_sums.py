"""Sums the buckets of a script's backward pass, while backward() still computes the next ones.

    main thread           begin, hand_over, close: the buckets, in the order in which DDP fills them
    communication thread  reduce, and what `worker.streamed_rounds` has for it
    data thread           copies a bucket into the scratch and sums it, then the next one

Buckets stay as they are until the main thread goes on, so a round that is void or fails can be
made again. The last bucket is contributed only after `complete`, which follows the Step of the
operation. So no rank can complete an operation that another one has not announced (R29), and a
script never sees a part of the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from paceline.core.rank import events as ev
from paceline.transport.native.copies import scale
from paceline.worker.data_channel import DataChannel
from paceline.worker.streamed_rounds import ABANDONED, Batch, Outcome, StreamedRound, StreamedRounds


def fill(scratch: torch.Tensor, bucket: torch.Tensor | None, factor: float) -> None:
    """Fill the scratch of a bucket with what this rank contributes.

    The factor is applied before the sum, as DDP does it. So the sum is the average, and needs no
    pass of its own.

    Args:
        scratch: One element more than the bucket: the last one is the flag of a void round.
        bucket: The bucket, which may have half the precision; None to contribute zeros.
        factor: Weight of this rank in the average.
    """
    if bucket is None:
        scratch.zero_()
        return
    own = scratch[:-1]
    if bucket.dtype is own.dtype and bucket.device == own.device:
        scale(bucket, own, factor)
    else:
        own.copy_(bucket).mul_(factor)
    scratch[-1] = 0


@dataclass(slots=True, kw_only=True)
class Backward(Batch):
    """The backward pass that is being computed."""

    owner: object
    """Who hands over the buckets: those of one model."""
    buckets: list[torch.Tensor] = field(default_factory=list)
    """Buckets that are ready, in order."""


@dataclass(slots=True, kw_only=True)
class _Streamed(StreamedRound[Backward]):
    """A streamed round in flight."""

    scratch: list[torch.Tensor]
    buckets: Sequence[torch.Tensor] | None
    """Buckets that this rank contributes; None for zeros."""
    factor: float


class BucketSums(StreamedRounds[Backward, _Streamed]):
    """Sums the streamed rounds of a script, bucket by bucket."""

    def __init__(self, channel: DataChannel, wake: Callable[[], None]) -> None:
        """Create it; its thread starts with the first streamed round.

        Args:
            channel: The data channel that sums.
            wake: Wakes the communication thread, which then calls `outcome`.
        """
        super().__init__(wake)
        self._channel = channel
        self._is_started = False

    # ---- main thread and autograd's threads -----------------------------------------------

    def begin(self, coming: ev.Coming, owner: object) -> bool:
        """Take over the buckets of a backward pass from here on.

        Args:
            coming: Announces the backward pass.
            owner: Who hands over its buckets. If it has begun one before, that one has failed.

        Returns:
            False if the buckets of another owner are still being handed over.
        """
        with self._news:
            before = self._batch
            if before is not None and not before.closed and before.owner is not owner:
                return False
            self._forget()
            self._batch = Backward(coming=coming, owner=owner)
        return True

    def hand_over(self, bucket: torch.Tensor) -> None:
        """Take over the next bucket. It must not change before the operation is complete."""
        with self._news:
            if self._batch is not None:
                self._batch.buckets.append(bucket)
                if self._round is not None:
                    self._news.notify_all()

    def close(self, step: ev.Step) -> None:
        """Note which operation comes next: that of the backward pass, or another one."""
        with self._news:
            backward = self._batch
            if backward is None:
                return
            if backward.coming.operation == step.operation:
                backward.closed = True
            else:
                self._forget()

    # ---- communication thread -------------------------------------------------------------

    def reduce(
        self,
        order: ev.Reduce,
        scratch: list[torch.Tensor],
        buckets: Sequence[torch.Tensor] | None,
        factor: float,
    ) -> None:
        """Begin a streamed round; `outcome` returns its end.

        Args:
            order: What to sum, and what this rank contributes.
            scratch: Memory for the sums, which belongs to the round until it has ended.
            buckets: Buckets of an operation that is announced; None for zeros, or if `order` says
                that the operation is still being computed.
            factor: Weight of this rank in the average.
        """
        if not self._is_started:
            self._is_started = True
            self._data.start()
        with self._news:
            backward, given_up = self._batch_of(order)
            self._round = _Streamed(
                batch=backward,
                given_up=given_up,
                scratch=scratch,
                buckets=buckets if backward is None else backward.buckets,
                factor=factor,
            )
        self._data.do(partial(self._sum_all, self._round))

    def complete(self) -> None:
        """Allow all of the backward pass to be contributed: the machine knows its Step."""
        with self._news:
            if self._batch is not None and self._batch.closed:
                self._announce()
            super().complete()

    # ---- data thread ----------------------------------------------------------------------

    def _is_ready(self, batch: Backward, number: int) -> bool:
        """Return True for a bucket that was handed over, and is not the last one."""
        assert batch.coming.operation is not None
        last = len(batch.coming.operation.parts) - 1
        return number < min(len(batch.buckets), last)

    def _sum_all(self, now: _Streamed) -> None:
        self.hidden_ns = 0
        outcome: Outcome | None = None
        for number in range(len(now.scratch)):
            outcome = self._sum(now, number)
            if outcome is not None:
                break
        self._end(outcome or ev.Reduced(now.spent_ns))

    def _sum(self, now: _Streamed, number: int) -> Outcome | None:
        """Sum one bucket; the first that all ranks see as void ends the round (R31)."""
        if not self._await(now, number):
            return ABANDONED
        given_up, scratch, buckets = now.given_up, now.scratch[number], now.buckets
        gives = buckets[number] if buckets is not None and given_up is None else None
        fill(scratch, gives, now.factor)
        if given_up is not None:
            scratch[-1] = 1
        with self._transfer(now):
            failed = self._channel.sum([scratch])
        if failed is not None:
            return failed
        return ev.Voided(now.given_up) if bool(scratch[-1]) else None

    def _await(self, now: _Streamed, number: int) -> bool:
        """Wait until a bucket may be contributed; False if the round is over."""
        with self._news:
            while not (self._stopping or self._may_contribute(now, number)):
                self._news.wait()
            return not self._stopping
