"""The life cycle of a streamed round on one rank, whatever its segments are made of (R27-R31).

    main thread           begins and drops the batch whose segments become ready
    communication thread  opens a round; complete, give_up, stop, outcome
    other threads         wait until a segment may be contributed, and end the round

A subclass says which segments of a batch are ready, and fills and sums them. It holds the lock
`_news` where it reads or changes the batch or the round, and notifies it afterwards.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from paceline.clock import now_ns
from paceline.core.protocol.records import GivenUp
from paceline.core.rank import events as ev
from paceline.errors import RuntimeBrokenError
from paceline.worker.serial_thread import SerialThread

PATIENCE_S: Final = 300.0
"""Upper bound on how long another thread of this rank may take to end an aborted reduction, or one
pass over memory, in seconds. Far beyond what a healthy thread takes."""
ABANDONED: Final = ev.ChannelFailed("given up for a new generation", aborted=True)
"""The outcome of a streamed round that was stopped before its end."""

Outcome = ev.Reduced | ev.Voided | ev.ChannelFailed


@dataclass(slots=True, kw_only=True)
class Batch:
    """A batch while backward() works on it."""

    coming: ev.Coming
    closed: bool = False
    """True once the main thread is through with the batch, so Coming would be too late."""
    complete: bool = False
    """True once the state machine knows the batch's Step, so all of it may be contributed."""
    dropped: bool = False
    """True if the script gave the batch up or began another one."""


B = TypeVar("B", bound=Batch)


@dataclass(slots=True, kw_only=True)
class StreamedRound(Generic[B]):
    """A streamed round in flight."""

    batch: B | None
    """The batch whose segments are waited for; None if all that GO names is there."""
    given_up: GivenUp | None
    """Why this rank flags the rest of the round; None if it does not."""
    spent_ns: int = 0
    """Time spent in transfers, in nanoseconds."""
    busy_since_ns: int = 0
    """Start of the transfer in flight; 0 while the data thread waits for a segment."""

    def give_up(self, why: GivenUp) -> None:
        """Flag the rest of the round; the first reason counts. The caller holds the lock."""
        self.given_up = self.given_up or why


R = TypeVar("R", bound=StreamedRound)  # type: ignore[type-arg] # a bound cannot name another variable


class StreamedRounds(ABC, Generic[B, R]):
    """Base class of what sums streamed rounds beside the communication thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Create it; its data thread starts with `_start_data`.

        Args:
            wake: Wakes the communication thread, which then calls `outcome`.
        """
        self._wake = wake
        self.hidden_ns = 0
        """Time of the last streamed round's transfers during which backward() still ran on this
        rank, in nanoseconds."""
        self._news: Final = threading.Condition()
        self._batch: B | None = None
        self._announced: B | None = None
        """The batch whose Step is being handled. While it is, the main thread may already begin the
        next batch."""
        self._round: R | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._data: Final = SerialThread("paceline-data", self._failed)

    @abstractmethod
    def _is_ready(self, batch: B, number: int) -> bool:
        """Return True if a segment of a batch that is not complete may be contributed."""

    # ---- main thread ----------------------------------------------------------------------

    def _forget(self) -> None:
        """Give up the batch that is being computed. The caller holds the lock."""
        if self._batch is not None:
            self._batch.dropped = True
            self._news.notify_all()
        self._batch = None

    # ---- communication thread -------------------------------------------------------------

    def _batch_of(self, order: ev.Reduce) -> tuple[B | None, GivenUp | None]:
        """Return the batch that a round waits for, and why this rank flags it from the start.

        The caller holds the lock.
        """
        batch = self._batch if order.in_hand else None
        gone = order.gives_up or (order.in_hand and batch is None)
        return batch, GivenUp.DROPPED if gone else None

    def _announce(self) -> B | None:
        """Take the batch whose Step is handled from now on, until `complete`."""
        with self._news:
            self._announced, self._batch = self._batch, None
            return self._announced

    def complete(self) -> None:
        """Allow all of the announced batch to be contributed: the machine knows its Step."""
        with self._news:
            if self._announced is not None:
                self._announced.complete = True
                self._news.notify_all()
            self._announced = None

    def give_up(self, why: GivenUp) -> None:
        """Contribute zeros and the flag from here on, in the streamed round in flight (R31)."""
        with self._news:
            if self._round is not None:
                self._round.give_up(why)
                self._news.notify_all()

    def stop(self) -> None:
        """Wait until no streamed round is in flight; the caller has raised the abort flag.

        RuntimeBrokenError is raised if the round does not end within PATIENCE_S all the same.
        """
        with self._news:
            self._stopping = True
            self._news.notify_all()
            self._wait_for(lambda: self._round is None, "the reduction that was given up")
            self._stopping = False

    def outcome(self) -> Outcome | None:
        """Return the outcome of the last streamed round, once; raise an error of another thread.

        Returns:
            The outcome, or None if there is none that was not taken yet.
        """
        if self._outcome is None and self._error is None:
            return None  # as in nearly all calls; the thread that sets one of them wakes this one
        with self._news:
            if self._error is not None:
                raise self._error
            outcome, self._outcome = self._outcome, None
        return outcome

    @property
    def busy_since_ns(self) -> int:
        """Start of the transfer in flight of a streamed round, in nanoseconds. Any thread.

        0 if there is none, or while it waits for a segment of this rank.
        """
        now = self._round
        return now.busy_since_ns if now is not None else 0

    def shutdown(self) -> None:
        """Let the threads end, and do not wait for them.

        A thread that is blocked in the channel ends only when the abort flag is raised.
        """
        with self._news:
            self._stopping = True
            self._news.notify_all()
        self._data.end()

    def _wait_for(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait until `is_over` returns True or another thread fails; the caller holds the lock.

        Raises:
            RuntimeBrokenError: Neither happened within PATIENCE_S.
        """
        if not self._news.wait_for(lambda: is_over() or self._error is not None, PATIENCE_S):
            raise RuntimeBrokenError(
                f"{what} has not ended within {PATIENCE_S:g} s",
                hint="a device, or a library beneath torch, may hang; see the log of the rank",
            )

    # ---- other threads --------------------------------------------------------------------

    def _may_contribute(self, now: R, number: int) -> bool:
        """Return True if a segment may be contributed, if only as zeros.

        The caller holds the lock. If it waits, the state machine ends the wait by `give_up` when
        the others have waited for long enough (R33), or by `stop`.
        """
        batch: B | None = now.batch
        if batch is None or now.given_up or batch.complete:
            return True
        if batch.dropped:
            now.give_up(GivenUp.DROPPED)
            return True
        return self._is_ready(batch, number)

    @contextmanager
    def _transfer(self, now: R) -> Iterator[None]:
        """Measure the block as a transfer of the round."""
        begun_ns = now.busy_since_ns = now_ns()
        yield
        now.busy_since_ns = 0
        now.spent_ns += now_ns() - begun_ns
        if now.batch is not None and not now.batch.complete:
            self.hidden_ns = now.spent_ns

    def _end(self, outcome: Outcome) -> None:
        """End the round in flight, and let the communication thread take the outcome."""
        with self._news:
            self._outcome, self._round = outcome, None
            self._news.notify_all()
        self._wake()

    def _failed(self, error: BaseException) -> None:
        """Keep the error of a thread; the communication thread raises it in `outcome`."""
        with self._news:
            self._error = error
            self._news.notify_all()
        self._wake()
