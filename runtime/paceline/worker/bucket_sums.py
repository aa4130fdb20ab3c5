"""Sums the buckets of a script's backward pass, while backward() still computes the next ones.

    main thread           begin, hand_over, close: the buckets, in the order in which DDP fills them
    communication thread  reduce, complete, give_up, stop, outcome
    data thread           copies a bucket into the scratch and sums it, then the next one

Buckets stay as they are until the main thread goes on, so a round that is void or fails can be
made again. The last bucket is contributed only after `complete`, which follows the Step of the
operation. So no rank can complete an operation that another one has not announced (R29), and a
script never sees a part of the averages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from paceline.clock import now_ns
from paceline.core.protocol.records import GivenUp
from paceline.core.rank import events as ev
from paceline.errors import RuntimeBrokenError
from paceline.worker.data_channel import DataChannel
from paceline.worker.reduction import ABANDONED, PATIENCE_S
from paceline.worker.serial_thread import SerialThread

Outcome = ev.Reduced | ev.Voided | ev.ChannelFailed


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
        torch.mul(bucket, factor, out=own)
    else:
        own.copy_(bucket).mul_(factor)
    scratch[-1] = 0


@dataclass(slots=True)
class Backward:
    """The backward pass that is being computed."""

    coming: ev.Coming
    owner: object
    """Who hands over the buckets: those of one model."""
    buckets: list[torch.Tensor] = field(default_factory=list)
    """Buckets that are ready, in order."""
    closed: bool = False
    """True once the main thread waits for the operation."""
    complete: bool = False
    """True once the state machine knows the operation's Step, so all of it may be contributed."""
    dropped: bool = False
    """True if the script makes another operation, or has begun the backward pass again."""


@dataclass(slots=True)
class _Streamed:
    """A streamed round in flight."""

    scratch: list[torch.Tensor]
    buckets: Sequence[torch.Tensor] | None
    """Buckets that this rank contributes; None for zeros."""
    backward: Backward | None
    """The backward pass that still fills the buckets; None if they are complete."""
    factor: float
    given_up: GivenUp | None
    """Why this rank flags the rest of the round; None if it does not."""
    spent_ns: int = 0
    """Time spent in transfers, in nanoseconds."""


class BucketSums:
    """Sums the streamed rounds of a script, bucket by bucket."""

    def __init__(self, channel: DataChannel, wake: Callable[[], None]) -> None:
        """Create it; its thread starts with the first streamed round.

        Args:
            channel: The data channel that sums.
            wake: Wakes the communication thread, which then calls `outcome`.
        """
        self._channel, self._wake = channel, wake
        self.hidden_ns = 0
        """Time of the last streamed round's transfers during which backward() still ran on this
        rank, in nanoseconds."""
        self.busy_since_ns = 0
        """Start of the transfer in flight; 0 while the data thread waits for a bucket."""
        self._news: Final = threading.Condition()
        self._backward: Backward | None = None
        self._round: _Streamed | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._data: SerialThread | None = None

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
            before = self._backward
            if before is not None and not before.closed and before.owner is not owner:
                return False
            self._forget()
            self._backward = Backward(coming, owner)
        return True

    def hand_over(self, bucket: torch.Tensor) -> None:
        """Take over the next bucket. It must not change before the operation is complete."""
        with self._news:
            if self._backward is not None:
                self._backward.buckets.append(bucket)
                if self._round is not None:
                    self._news.notify_all()

    def close(self, step: ev.Step) -> None:
        """Note which operation comes next: that of the backward pass, or another one."""
        with self._news:
            backward = self._backward
            if backward is None:
                return
            if backward.coming.operation == step.operation:
                backward.closed = True
            else:
                self._forget()

    def _forget(self) -> None:
        if self._backward is not None and not self._backward.closed:
            self._backward.dropped = True
            self._news.notify_all()
        self._backward = None

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
        if self._data is None:
            self._data = SerialThread("paceline-data", self._failed)
            self._data.start()
        with self._news:
            backward = self._backward if order.in_hand else None
            gone = order.gives_up or (order.in_hand and backward is None)
            held = buckets if backward is None else backward.buckets
            given_up = GivenUp.DROPPED if gone else None
            self._round = _Streamed(scratch, held, backward, factor, given_up)
        self._data.do(partial(self._sum_all, self._round))

    def complete(self) -> None:
        """Allow all of the backward pass to be contributed: the machine knows its Step."""
        with self._news:
            if self._backward is not None and self._backward.closed:
                self._backward.complete = True
                self._backward = None
                self._news.notify_all()

    def give_up(self, why: GivenUp) -> None:
        """Contribute zeros and the flag from here on, in the streamed round in flight (R31)."""
        with self._news:
            if self._round is not None:
                self._round.given_up = self._round.given_up or why
                self._news.notify_all()

    def stop(self) -> None:
        """Wait until no streamed round is in flight; the caller has raised the abort flag.

        Raises:
            RuntimeBrokenError: The round does not end within PATIENCE_S all the same.
        """
        with self._news:
            self._stopping = True
            self._news.notify_all()
            ended = self._news.wait_for(lambda: self._round is None or self._error, PATIENCE_S)
            self._stopping = False
        if not ended:
            raise RuntimeBrokenError(
                f"a reduction that was given up has not ended within {PATIENCE_S:g} s",
                hint="a library beneath torch may hang; see the log of the rank",
            )

    def outcome(self) -> Outcome | None:
        """Return the outcome of the last streamed round, once; raise an error of the data thread.

        Returns:
            The outcome, or None if there is none that was not taken yet.
        """
        if self._data is None:
            return None  # no round was streamed yet
        with self._news:
            if self._error is not None:
                raise self._error
            outcome, self._outcome = self._outcome, None
        return outcome

    def shutdown(self) -> None:
        """Let the thread end, and do not wait for it."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        if self._data is not None:
            self._data.end()

    # ---- data thread ----------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        with self._news:
            self._error = error
            self._news.notify_all()
        self._wake()

    def _sum_all(self, now: _Streamed) -> None:
        self.hidden_ns = 0
        outcome: Outcome = ABANDONED
        for number in range(len(now.scratch)):
            ended = self._sum(now, number)
            if ended is not None:
                outcome = ended
                break
        else:
            outcome = ev.Reduced(now.spent_ns)
        with self._news:
            self._outcome, self._round = outcome, None
            self._news.notify_all()
        self._wake()

    def _sum(self, now: _Streamed, number: int) -> Outcome | None:
        """Sum one bucket; the first that all ranks see as void ends the round (R31)."""
        if not self._await(now, number):
            return ABANDONED
        given_up, scratch, buckets = now.given_up, now.scratch[number], now.buckets
        gives = buckets[number] if buckets is not None and given_up is None else None
        fill(scratch, gives, now.factor)
        if given_up is not None:
            scratch[-1] = 1
        begun_ns = self.busy_since_ns = now_ns()
        failed = self._channel.sum([scratch])
        self.busy_since_ns = 0
        now.spent_ns += now_ns() - begun_ns
        if now.backward is not None and not now.backward.complete:
            self.hidden_ns = now.spent_ns
        if failed is not None:
            return failed
        return ev.Voided(now.given_up) if bool(scratch[-1]) else None

    def _await(self, now: _Streamed, number: int) -> bool:
        """Wait until a bucket may be contributed, if only as zeros; False if the round is over."""
        with self._news:
            while not self._stopping:
                backward = now.backward
                if backward is None or now.given_up or backward.complete:
                    return True
                if backward.dropped:
                    now.given_up = GivenUp.DROPPED
                    return True
                if number < min(len(backward.buckets), len(now.scratch) - 1):
                    return True
                # The state machine ends the wait by `give_up` when the others have waited for long
                # enough (R33), or by `stop`.
                self._news.wait()
            return False
