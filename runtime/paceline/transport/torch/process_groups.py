"""Base of gloo and NCCL: process groups of torch.distributed, one per generation.

torch.distributed cannot end a collective that waits for a stopped peer, so nothing here blocks on
one. Completion wakes the calling thread, an abort leaves work and group where they are, and a new
group beside them works. An abandoned group is kept until its work has ended, because destroying it
would wait. The default process group is never touched: it belongs to the user's script.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from paceline.core.collectives import same_bits
from paceline.core.collectives.conduct import Bits, Conduct
from paceline.transport.base import (
    HOST,
    Abort,
    Group,
    PeerLost,
    Transport,
    TransportAborted,
    TransportError,
)
from paceline.transport.rendezvous import Deadline
from paceline.transport.torch.probe import digest, make_probes

WAIT_S: Final = 0.5
"""Longest sleep between two checks of the abort flag, in seconds. Completion and abort both wake
the thread earlier."""
REFERENCE: Final = 0
"""Index of the rank that reduces where the library's own allreduce does not give equal bits (R23).
"""
OWN: Final = ("allreduce",)
BY_ONE_RANK: Final = ("reduce", "broadcast")


class _Attempt(threading.Thread):
    """Thread that makes one process group. The caller may stop waiting for it at any time."""

    def __init__(self, make: Callable[[Deadline], Any], timeout_s: float, abort: Abort) -> None:
        super().__init__(name="paceline-group", daemon=True)
        self._make = make
        self._timeout_s = timeout_s
        self._abort = abort
        # A flag of its own: the caller's may be lowered before this thread has ended.
        self.cancelled = Abort()
        self.done = False
        self.group: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.group = self._make(Deadline(self.cancelled, self._timeout_s))
        except Exception as error:
            self.error = error
        self.done = True
        self._abort.wake()


class TorchDistTransport(Transport):
    """One process group per generation, abandoned and made anew on change."""

    same_bits: ClassVar[bool]
    """True if the library's own allreduce gives the same bits on all ranks, as tests/transport show
    (R23). Otherwise each group compares the bits of its ranks."""
    under_way_max: int = 1
    """Number of buffers in flight in `allreduce_in_turn`."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._process_group: Any = None
        self._works: list[Any] = []
        self._kept: list[tuple[Any, list[Any], Any]] = []
        self._abandoned = 0
        self._operations: tuple[str, ...] = OWN
        self._differing: tuple[str, ...] = ()

    @abstractmethod
    def _connect(self, group: Group, deadline: Deadline) -> Any:
        """Make the process group. Runs in a throw-away thread and may block in the library."""

    def _adopt(self, made: Any) -> Any:
        """Take over what `_connect` made, on the communication thread, and return the group."""
        return made

    @abstractmethod
    def _await(self, works: list[Any], abort: Abort, deadline: Deadline | None) -> None:
        """Return when all works are complete or the abort flag is raised.

        It raises PeerLost after the deadline.

        Args:
            works: Works of torch.distributed in flight.
            abort: Ends the wait when it is raised.
            deadline: When to give up, or None to wait without a bound.
        """

    def _home(self) -> torch.device:
        """Return the device whose memory this transport moves."""
        return HOST

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        """Make a process group for this generation, and compare bits if the library needs it."""
        self.close()
        deadline = Deadline(abort, timeout_s)
        self._operations, self._differing = OWN, ()
        if group.size > 1:
            self._process_group = self._adopt(self._make_group(group, deadline))
            if not self.same_bits:
                self._compare(group.rank, deadline)
        self._group = group
        self._forget_completed()

    def _make_group(self, group: Group, deadline: Deadline) -> Any:
        what = f"wiring {self.name} for {group.size} ranks"
        abort = deadline.abort
        attempt = _Attempt(lambda limit: self._connect(group, limit), deadline.timeout_s, abort)
        attempt.start()
        try:
            while not attempt.done:
                deadline.pause(WAIT_S, what)
        finally:
            attempt.cancelled.raise_()
        if attempt.error is not None:
            if abort.is_raised():
                raise TransportAborted(f"abandoned while {what}")
            raise PeerLost(f"{what} failed: {attempt.error}") from attempt.error
        return attempt.group

    def _compare(self, rank: int, deadline: Deadline) -> None:
        """Use the library's allreduce for this group if it gives all ranks the same bits."""
        probes = make_probes(rank, self._home())
        self._reduce(OWN, probes, deadline.abort, deadline)
        votes = torch.tensor(same_bits.vote([digest(p) for p in probes]), device=self._home())
        self._reduce(BY_ONE_RANK, [votes], deadline.abort, deadline, dist.ReduceOp.MAX)
        self._differing = same_bits.differing(votes.tolist())
        self._operations = BY_ONE_RANK if self._differing else OWN

    def allreduce(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,  # noqa: ARG002
    ) -> None:
        """Sum all buffers at once with the library's allreduce, or by one rank (R23)."""
        assert self._group is not None, "allreduce outside a group"
        full = [buffer.detach() for buffer in buffers if buffer.numel()]
        if self._group.size == 1 or not full:
            return
        self._reduce(self._operations, full, abort)

    def allreduce_in_turn(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
        summed: Callable[[], None],
    ) -> None:
        """Sum the buffers in order, with up to `under_way_max` of them in flight."""
        assert self._group is not None, "allreduce outside a group"
        plain = self._operations == OWN and all(buffer.numel() for buffer in buffers)
        if self._group.size == 1 or not plain:
            super().allreduce_in_turn(buffers, abort, algorithm, summed)
            return
        with self._abandoning(buffers):
            for buffer in buffers:
                if len(self._works) == self.under_way_max:
                    self._finish(self._works, abort, None, count=1)
                    summed()
                self._works.append(self._launch(OWN[0], buffer.detach(), dist.ReduceOp.SUM))
            while self._works:
                self._finish(self._works, abort, None, count=1)
                summed()

    def _reduce(
        self,
        operations: Sequence[str],
        buffers: list[torch.Tensor],
        abort: Abort,
        deadline: Deadline | None = None,
        by: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        """Run one operation after the other on all buffers."""
        with self._abandoning(buffers):
            for operation in operations:
                works = [self._launch(operation, buffer, by) for buffer in buffers]
                self._finish(works, abort, deadline)

    @contextmanager
    def _abandoning(self, buffers: Any) -> Iterator[None]:
        """Abandon the group, with these buffers, if the block fails.

        Args:
            buffers: Tensors that the works in flight may still write to.

        Yields:
            Nothing.

        Raises:
            TransportError: The block raised it.
            PeerLost: The library raised a RuntimeError.
        """
        try:
            yield
        except TransportError:
            self._abandon(buffers)
            raise
        except RuntimeError as error:
            self._abandon(buffers)
            raise PeerLost(f"{self.name} failed: {error}") from error

    def _launch(self, operation: str, buffer: torch.Tensor, by: dist.ReduceOp.RedOpType) -> Any:
        if operation == "allreduce":
            return self._process_group.allreduce([buffer])
        if operation == "broadcast":
            return self._process_group.broadcast(buffer, REFERENCE)
        return self._process_group.reduce(buffer, REFERENCE, by)

    def _finish(
        self, works: list[Any], abort: Abort, deadline: Deadline | None, count: int | None = None
    ) -> None:
        """Wait for the first `count` of the works in flight, or for all of them.

        It raises the error of a failed work.

        Args:
            works: Works in flight, in order.
            abort: Ends the wait when it is raised.
            deadline: When to give up, or None.
            count: How many to wait for. None: all.

        Raises:
            TransportAborted: The abort flag was raised before they were complete.
        """
        self._works, first = works, works[:count]
        self._await(first, abort, deadline)
        if abort.is_raised() and not all(work.is_completed() for work in first):
            raise TransportAborted("abandoned in a reduction")
        for work in first:
            work.wait()
        self._works = works[len(first) :]

    def _abandon(self, buffers: Any) -> None:
        """Keep the memory that abandoned works may still write to, and leave the group."""
        if self._process_group is not None:
            self._kept.append((self._process_group, self._works, buffers))
            self._abandoned += 1
        self._process_group, self._works = None, []

    def _forget_completed(self) -> None:
        kept, self._kept = self._kept, []
        done: list[Any] = []
        for entry in kept:
            over = all(work.is_completed() for work in entry[1])
            (done if over else self._kept).append(entry)
        for process_group, _, buffers in done:
            if buffers is None:
                self._let_go(process_group)

    def _let_go(self, process_group: Any) -> None:
        """Release a group whose works have all completed and that nobody needs any more."""

    def close(self) -> None:
        """Leave the group. It is kept until the next one is open, since a peer may still read."""
        # Keep the group until the next one is open: a peer may still read what was sent.
        if self._process_group is not None:
            self._kept.append((self._process_group, self._works, None))
        self._group, self._process_group, self._works = None, None, []

    def conducts(self) -> tuple[Conduct, ...]:
        """Return one value, which says why all ranks get the same bits."""
        compared = Bits.ONE_RANK if self._differing else Bits.COMPARED
        return (Conduct(self.name, bits=Bits.ORDER if self.same_bits else compared),)

    def describe(self) -> dict[str, str]:
        """Return how sums are made, and how many groups were abandoned."""
        return {
            "provider": self.name,
            "sums": self._how(),
            "abandoned": str(self._abandoned),
            "abandoned.alive": str(len(self._kept)),
        }

    def _how(self) -> str:
        if not self._differing:
            return "allreduce"
        sizes = ", ".join(self._differing)
        return f"reduce and broadcast: its allreduce gave ranks other bits at {sizes}"
