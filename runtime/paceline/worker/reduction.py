"""Carries out the reductions that the state machine asks for, segment by segment (R27-R31).

A round that is not streamed is summed at once, on the communication thread. In a streamed round two
more threads go from segment to segment while backward() still computes the next ones. So the
communication thread can handle events meanwhile, and the link carries one segment while the next
one is prepared.

    main thread           begin, hand_over, close, judge: the batch whose segments become ready
    communication thread  reduce, finish, beside, joined, and the life cycle of a streamed round
                          (`worker.streamed_rounds`)
    memory thread         checks a first segment, then posts Coming; fills the scratch of a
                          streamed round, and computes averages of what is summed
    data thread           sums what is filled; passes over memory beside the communication thread

hand_over may also run on one of autograd's threads. A segment is contributed only when it is final
and finite; the last one only after `complete`, which follows the batch's Step. So nothing of a
batch can be applied before it has been announced (R29).
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from msgspec.structs import replace

from paceline.clock import now_ns
from paceline.core.protocol.pending import BufferName
from paceline.core.protocol.records import GivenUp
from paceline.core.rank import events as ev
from paceline.telemetry.samples import RoundRing
from paceline.transport.device_queues import DeviceEvent
from paceline.worker.data_channel import DataChannel
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from paceline.worker.streamed_rounds import ABANDONED, Batch, Outcome, StreamedRound, StreamedRounds

log = logging.getLogger("paceline.rank")

NOBODY_LOOKED: Final[array[int]] = array("Q")
"""Empty list of hand-over times, for a batch that was not watched."""
FloatBuffers = Callable[[bool], torch.Tensor]
"""Returns the model's float buffers as one flat tensor; zeros if the argument is False."""


@dataclass(slots=True, kw_only=True)
class LeasedBatch(Batch):
    """The last batch of a lease, while backward() works on it."""

    ready_ns: array[int]
    """Time at which each segment was handed over, in nanoseconds; 0 = not yet."""
    handed: dict[int, tuple[int, list[DeviceEvent]]] = field(default_factory=dict)
    """Segments that are ready: how often each had been written by then, and the device events that
    must pass before it is complete."""
    looked_at: set[int] = field(default_factory=set)
    """Segments that were checked for NaN and Inf."""
    finite: bool = True
    """False once a checked segment was not finite, as far as the host knows."""


@dataclass(slots=True, kw_only=True)
class _Streamed(StreamedRound[LeasedBatch]):
    """A streamed round in flight."""

    order: ev.Reduce
    filled: int = 0
    """Number of segments that were handed to the data thread."""
    summed: int = 0
    averaged: int = 0
    end: Outcome | None = None


class Reducer(StreamedRounds[LeasedBatch, _Streamed]):
    """Sums the rounds of one rank, from the beginning of its training on."""

    def __init__(
        self,
        channel: DataChannel,
        gradients: Gradients,
        committed: Committed,
        float_buffers: FloatBuffers,
        post: Callable[[ev.Coming | None], None],
        notes: RoundRing,
    ) -> None:
        """Create a reducer; its threads start with the first batch that is watched.

        Args:
            channel: The data channel that sums.
            gradients: Gradient buffers and the scratch of the reduction.
            committed: Committed state, which takes averages of summed segments.
            float_buffers: Returns the model's float buffers for a round that averages them (D10).
            post: Queues an event for the communication thread; with None it only wakes the thread.
            notes: Record of the round's times: when each segment was ready, filled and summed.
        """
        super().__init__(partial(post, None))
        self._channel, self._gradients, self._committed = channel, gradients, committed
        self._float_buffers, self._post, self._notes = float_buffers, post, notes
        self._last: Final = len(gradients.layout.segments) - 1
        self.synced: torch.Tensor | None = None
        """The average of the float buffers from the last round, or None (D10)."""
        self._flags: Final = gradients.flags
        self._closing = False
        self._thread: threading.Thread | None = None
        self._beside = False
        """True while work that `joined` waits for is on the data thread."""

    # ---- main thread and autograd's threads -----------------------------------------------

    def begin(self, coming: ev.Coming) -> None:
        """Watch the segments of the next batch, the last one of these leases. Main thread."""
        if not self._last:
            return
        with self._news:
            self._forget()
            ready_ns = array("Q", bytes(8 * (self._last + 1)))
            self._batch = LeasedBatch(coming=coming, ready_ns=ready_ns)
            self._start_thread()
        self._gradients.watch(self.hand_over)

    def hand_over(self, segment: int) -> None:
        """Take over a segment to which all gradients are added, or whose kernels are queued.

        Called by the main thread or one of autograd's threads.
        """
        written, ready = self._gradients.written(segment), self._gradients.streams.mark_gradients()
        with self._news:
            batch = self._batch
            if batch is None or batch.closed:
                return
            batch.ready_ns[segment] = now_ns()
            if segment == self._last:
                return
            batch.handed[segment] = written, ready
            if segment == 0 or self._round is not None:
                self._news.notify_all()

    def close(self, *, dropped: bool = False) -> None:
        """End the watch over the batch; its Step or Skip follows. Main thread.

        Args:
            dropped: True if the script has given the batch up.
        """
        if not self._last:
            return
        self._gradients.watch(None)
        with self._news:
            if self._batch is not None:
                self._batch.closed = True
            if dropped:
                self._forget()

    def judge(self) -> list[DeviceEvent]:
        """Queue the checks on devices that `finish` needs. Main thread, after the batch.

        Returns:
            Events to wait for before the Step is posted; empty if no parameter is on a device.
        """
        streams = self._gradients.streams
        computed = streams.mark_gradients()
        if not computed:
            return []
        with self._news:
            _, left = self._left_of(self._batch)
        with streams.own():
            streams.follow(computed)
            self._gradients.find(left)
            self._flags.queue_copy()
            return streams.mark_own()

    def _left_of(self, batch: LeasedBatch | None) -> tuple[LeasedBatch | None, list[int]]:
        """Return what is known of a batch, and which segments of GRAD are still unchecked.

        Returns:
            The batch, or None if a segment was written again after it was handed over; and the
            segments that were not checked since they were last written.
        """
        changed = batch is None or any(
            self._gradients.written(segment) != written
            for segment, (written, _) in batch.handed.items()
        )
        known = None if changed else batch
        checked = known.looked_at if known is not None else ()
        return known, [s for s in range(self._last + 1) if s not in checked]

    # ---- communication thread -------------------------------------------------------------

    def reduce(self, order: ev.Reduce) -> ev.Reduced | ev.ChannelFailed | None:
        """Sum a round that is not streamed, or start a streamed one. Communication thread.

        Args:
            order: What to sum, and what this rank contributes.

        Returns:
            The outcome, or None for a streamed round, whose outcome `outcome` returns later.
        """
        self.synced = None
        if not order.go.streamed:
            return self._sum_all(order)
        with self._news:
            batch, given_up = self._batch_of(order)
            self._round = _Streamed(batch=batch, given_up=given_up, order=order)
            self._start_thread()
            self._news.notify_all()
        return None

    def finish(self, step: ev.Step) -> ev.Step:
        """Return the Step with the result of the checks of its gradient. Communication thread.

        The caller lets the state machine handle the Step, and calls `complete` after that. If a
        round is streaming this batch, and the batch turns out wrong, the rest of the round is
        flagged.

        Args:
            step: The Step as the main thread has posted it.

        Returns:
            The same Step, with `finite` set to False if the gradient is not.
        """
        batch = self._announce()
        self._notes.handed_over(batch.ready_ns if batch is not None else NOBODY_LOOKED)
        known, left = self._left_of(batch)
        on_host = [s for s in left if s not in self._flags]
        finite = step.finite and (known is None or known.finite)
        finite = finite and self._flags.are_finite(range(self._last + 1))
        finite = finite and self._gradients.finite(BufferName.GRAD, on_host)
        with self._news:
            now = self._round
            if now is not None and batch is not None and now.batch is batch:
                if known is None or batch.coming != _coming_of(step):
                    now.give_up(GivenUp.REWRITTEN)
                elif not finite:
                    now.give_up(GivenUp.NONFINITE)
        return step if finite == step.finite else replace(step, finite=finite)

    def outcome(self) -> Outcome | None:
        """Return the outcome of the last streamed round, once. Communication thread.

        An error of the memory or the data thread is raised here. After a failure the scratch of the
        reduction is replaced.

        Returns:
            The outcome, or None if there is none that was not taken yet.
        """
        outcome = super().outcome()
        if isinstance(outcome, ev.ChannelFailed):
            self._gradients.renew_result()
        if not isinstance(outcome, ev.Reduced | None):
            self._committed.forget_prepared()
        return outcome

    def beside(self, work: Callable[[], None]) -> None:
        """Run `work` on the data thread while the communication thread goes on.

        The communication thread calls `joined` before it uses the result. Without a data thread the
        model is small, and `work` runs at once.

        Args:
            work: A pass over the gradient buffers.
        """
        if self._thread is None:
            self._do(work)
            return
        self.joined()
        self._beside = True
        self._data.do(partial(self._do, work))

    def joined(self) -> None:
        """Wait until what was given to `beside` is done. Communication thread.

        RuntimeBrokenError is raised if it is not done within PATIENCE_S.
        """
        if self._beside:
            with self._news:
                self._wait_for(lambda: not self._beside, "the pass over the gradients")

    def _do(self, work: Callable[[], None]) -> None:
        with self._gradients.streams.own():
            work()
        with self._news:
            self._beside = False
            self._news.notify_all()

    def shutdown(self) -> None:
        """Let both threads end, and do not wait for them. Communication thread."""
        self._closing = True
        super().shutdown()

    # ---- communication thread or data thread ----------------------------------------------

    def _sum_all(self, order: ev.Reduce) -> ev.Reduced | ev.ChannelFailed:
        gradients, begun_ns = self._gradients, now_ns()
        with gradients.streams.own():
            gradients.load_results(order.source, order.factor, order.unit)
            failed = self._channel.sum(gradients.result, gradients.rounded_away)
            failed = failed or self._sum_float_buffers(order)
        if failed is not None:
            gradients.renew_result()
            return failed
        return ev.Reduced(now_ns() - begun_ns)

    def _sum_float_buffers(self, order: ev.Reduce) -> ev.ChannelFailed | None:
        if not order.go.sync:
            return None
        flat = self._float_buffers(order.source is not None)
        if flat.numel() and (failed := self._channel.sum([flat])) is not None:
            return failed
        count = order.go.contributing
        self.synced = flat.div_(count) if count else None
        return None

    # ---- memory thread --------------------------------------------------------------------

    def _start_thread(self) -> None:
        """Start both threads at first use; most jobs with small models never need them."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-memory", daemon=True)
            self._thread.start()
            self._data.start()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._work()
        except BaseException as error:
            self._failed(error)

    def _work(self) -> None:
        with self._news:
            while not (self._closing or self._round or self._unseen(self._batch)):
                self._news.wait()
            now, batch = self._round, self._batch
        if now is not None:
            self._end(self._stream(now))
        elif batch is not None and self._unseen(batch) and self._look(batch, 0):
            with self._news:
                if self._batch is batch and not batch.closed:
                    self._post(batch.coming)

    @staticmethod
    def _unseen(batch: LeasedBatch | None) -> bool:
        return batch is not None and 0 in batch.handed and 0 not in batch.looked_at

    def _look(self, batch: LeasedBatch, segment: int) -> bool:
        """Check a segment for NaN and Inf, once, as far as the host can know.

        A segment on a device is only queued for its check; the result travels with the segment's
        number (R31).

        Returns:
            False if the segment is not finite, or one that was checked before was not.
        """
        if segment in batch.looked_at:
            return batch.finite
        streams = self._gradients.streams
        with streams.own():
            streams.follow(batch.handed[segment][1])
            if segment in self._flags:
                self._gradients.find((segment,))
                finite = True
            else:
                finite = self._gradients.finite(BufferName.GRAD, (segment,))
        with self._news:
            batch.looked_at.add(segment)
            batch.finite &= finite
        return finite

    def _stream(self, now: _Streamed) -> Outcome:
        self.hidden_ns = 0
        while (segment := self._await(now)) is not None:
            if segment < now.filled:
                assert now.order.divisor is not None
                with self._gradients.streams.own():
                    self._committed.prepare(segment, now.order.divisor)
                now.averaged += 1
            else:
                self._fill(now, segment)
                now.filled += 1
                self._data.do(partial(self._sum, now, segment))
        return now.end or ABANDONED

    def _await(self, now: _Streamed) -> int | None:
        """Wait for the next segment to work on.

        A segment that can be contributed, if only as zeros, comes before one whose average can be
        made.

        Returns:
            The segment, or None when the round is over. Averages that are missing then are made as
            in a round that is not streamed.
        """
        with self._news:
            while now.end is None and self._error is None:
                if self._stopping:
                    self._wait_for(
                        lambda: now.summed == now.filled or now.end is not None,
                        "the sum of a segment that was given up",
                    )
                    break
                if now.filled <= self._last and self._may_contribute(now, now.filled):
                    return now.filled
                if now.order.divisor and now.averaged < now.summed:
                    return now.averaged
                self._news.wait()  # for a segment of the script, or for a sum
        return None

    def _is_ready(self, batch: LeasedBatch, number: int) -> bool:
        return number in batch.handed

    def _fill(self, now: _Streamed, segment: int) -> None:
        """Fill a segment of the scratch with what this rank contributes."""
        gradients, order, batch = self._gradients, now.order, now.batch
        if batch is not None and not (now.given_up or batch.complete or self._look(batch, segment)):
            now.give_up(GivenUp.NONFINITE)
        with gradients.streams.own():
            source = order.source if now.given_up is None else None
            gradients.load_results(source, order.factor, order.unit, segments=(segment,))
            if source is not None and segment in self._flags and self._is_found(batch, segment):
                self._flags.put(segment, gradients.result[segment])
        self._notes.opened(segment, now_ns())

    @staticmethod
    def _is_found(batch: LeasedBatch | None, segment: int) -> bool:
        """Return True if a device checks this segment and the host does not know the result yet."""
        return batch is not None and not batch.complete and segment in batch.looked_at

    # ---- data thread ----------------------------------------------------------------------

    def _sum(self, now: _Streamed, segment: int) -> None:
        """Sum one segment. Data thread.

        The first segment that all ranks see as void ends the round (R31).
        """
        with self._news:
            if self._stopping:
                now.end = now.end or ABANDONED
                self._news.notify_all()
        if now.end is not None:
            return
        gradients, result = self._gradients, self._gradients.result[segment]
        with self._transfer(now), gradients.streams.own():
            if now.given_up is not None:  # perhaps after the scratch was filled
                result[-1] = 1
            failed = self._channel.sum([result], gradients.rounded_away[segment : segment + 1])
            void = failed is None and bool(result[-1])
            if void and now.given_up is None and self._is_own_fault(now):
                now.give_up(GivenUp.NONFINITE)
            if failed is None and not void and segment == self._last:
                failed = self._sum_float_buffers(now.order)
        with self._news:
            now.summed += 1
            if failed is not None or void:
                now.end = failed or ev.Voided(now.given_up)
            elif segment == self._last:
                now.end = ev.Reduced(now.spent_ns)
            self._news.notify_all()

    def _is_own_fault(self, now: _Streamed) -> bool:
        """Return True if a device of this rank is the reason why the round is void.

        Returns:
            True if a checked segment of this rank's batch is not finite.
        """
        with self._news:
            on_device = [s for s in now.batch.looked_at if s in self._flags] if now.batch else []
        if on_device:
            self._flags.queue_copy()
            self._gradients.streams.complete()
        return not self._flags.are_finite(on_device)


def _coming_of(step: ev.Step) -> ev.Coming:
    return ev.Coming(step.leases, step.samples, step.unit)
