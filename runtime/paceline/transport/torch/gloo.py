"""The data channel through gloo: host memory over TCP, bound to one address (D13).

The ranks exchange gloo's addresses over `rendezvous` and not over torch's TCPStore. That one looks
up the name of every address that it connects to, and an unanswered DNS request delayed one in a
hundred group changes by five seconds. A rendezvous has no name service, but an abort flag and a
deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar, Final

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import ProcessGroupGloo

from paceline.clock import now_ns
from paceline.transport.base import Abort, Group, PeerLost, Stage
from paceline.transport.rendezvous import (
    FRAME_BYTES_MAX,
    LAST_WORDS_NS,
    POLL_S,
    Deadline,
    PeerClosedError,
    PeerConnection,
    PeerConnections,
    Rendezvous,
)
from paceline.transport.torch.process_groups import TorchDistTransport

STAGE_BYTES: Final = 1 << 20
"""Size in bytes of the pieces of a buffer that a stage fills. Each piece is a sum of its own for
gloo."""
STAGES: Final = 3
"""Number of pieces in flight while the next one is filled."""
THREADS: Final = 2
"""Number of gloo's threads that carry out sums, as in DDP. Measured between two ranks on two cores,
for 34 MB as one piece and as eight: with one thread 21 and 37 ms, with two 16 and 15 ms."""
PIECE_BYTES: Final = FRAME_BYTES_MAX // 2
PACKING_BYTES: Final = 16
"""Bound on the bytes that the encoding adds to a key and a value."""
SOON: Final = timedelta(milliseconds=2)
"""Time within which small sums complete. An abort waits as long."""
VAIN_MAX: Final = 32
"""Upper bound on the number of sums that nothing waits for inside gloo, after such a wait was in
vain. torch then raises an error with a stack trace, which took 0.1 ms of CPU time (measured)."""
LOOK_S: Final = 0.05
"""Seconds between two checks of the connections during a reduction. Its end wakes the thread at
once."""


class Nothing(msgspec.Struct, frozen=True):
    """An empty offer: two ranks that meet over it exchange nothing but their identities."""


class Values(msgspec.Struct, frozen=True):
    """A part of the values that ranks have set in the store."""

    values: dict[str, bytes]
    last: bool


class _Exchange(Store):
    """The store that gloo's rendezvous needs.

    Every rank sets a value, then asks for those of all ranks. Rank 0 collects the values and sends
    all of them to every rank, in pieces: each value grows with the group, so the whole grows with
    its square. A store of torch would give nothing more here and would take longer to fail.
    """

    def __init__(
        self, rendezvous: Rendezvous, lock: threading.Lock, group: Group, deadline: Deadline
    ) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._lock = lock
        self._group = group
        self._deadline = deadline
        self.connections = PeerConnections()
        self._values: dict[str, bytes] = {}
        self._complete = False

    def set(self, key: str, value: Any) -> None:
        """Keep a value of this rank until the exchange."""
        self._values[key] = value

    def get(self, key: str) -> bytes:
        """Return a value, after the exchange if it is another rank's."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Exchange the values of all ranks if one of the keys is missing.

        Args:
            keys: Keys that gloo asks for.
            timeout: Unused. The deadline of the group counts.

        Raises:
            RuntimeError: No rank has set one of the keys.
        """
        if not self._complete and not all(key in self._values for key in keys):
            # A canceled attempt may still hold the rendezvous for a moment.
            while not self._lock.acquire(timeout=POLL_S):
                self._deadline.check("waiting for the last attempt to end")
            try:
                self._exchange()
            finally:
                self._lock.release()
            self._complete = True
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise RuntimeError(f"gloo needs {missing}, which is not set")

    def _exchange(self) -> None:
        # Keep the connections: gloo notices only the death of the peer that it waits for.
        own = dict(self._values)
        if self._group.rank == 0:
            self._collect_and_tell(own)
        else:
            self._tell_and_learn(own)

    def _tell_and_learn(self, own: dict[str, bytes]) -> None:
        # Rank 0 answers only members of its group, and takes no values from strangers.
        _, connection = self._rendezvous.dial(self._group, 0, Nothing(), Nothing, self._deadline)
        self.connections.add(0, connection)
        what = "waiting for the other ranks' addresses from rank 0"
        try:
            for piece in _pieces([own]):
                connection.send(piece, self._deadline)
            self._learn(connection, what, 0)
        except PeerClosedError as error:
            raise PeerLost(f"rank 0 has gone while {what}", 0) from error

    def _collect_and_tell(self, own: dict[str, bytes]) -> None:
        everything = [own]
        connections = []
        for rank in range(1, self._group.size):
            _, connection = self._rendezvous.answer(self._group, rank, Nothing, self._deadline)
            self.connections.add(rank, connection)
            connections.append((rank, connection))
            with self._lost(rank):
                connection.send(Nothing())
        for rank, connection in connections:
            with self._lost(rank):
                everything.append(self._learn(connection, f"reading rank {rank}'s addresses", rank))
        pieces = list(_pieces(everything))
        for rank, connection in connections:
            with self._lost(rank):
                for piece in pieces:
                    connection.send(piece)

    @contextmanager
    def _lost(self, rank: int) -> Iterator[None]:
        try:
            yield
        except PeerClosedError as error:
            raise PeerLost(f"rank {rank} has gone while it got the addresses", rank) from error

    def _learn(self, connection: PeerConnection, what: str, rank: int) -> dict[str, bytes]:
        """Receive all values that the other end sends, and keep them."""
        learned: dict[str, bytes] = {}
        last = False
        while not last:
            piece = connection.receive(Values, self._deadline, what, rank)
            learned |= piece.values
            last = piece.last
        self._values |= learned
        return learned


def _pieces(everything: Iterable[dict[str, bytes]]) -> Iterator[Values]:
    """Yield messages that hold all values, none of them too large to send. The last one is marked.

    Args:
        everything: Values by key, of one or several ranks.

    Yields:
        The messages.
    """
    values: dict[str, bytes] = {}
    size = 0
    for own in everything:
        added = sum(len(key) + len(value) + PACKING_BYTES for key, value in own.items())
        if values and size + added > PIECE_BYTES:
            yield Values(values, last=False)
            values, size = {}, 0
        values |= own
        size += added
    yield Values(values, last=True)


class _ShortWait:
    """Waits for a moment inside gloo, as long as sums mostly end within it.

    This takes the interpreter lock once, at the end. A callback that wakes this thread would first
    take it in a thread of gloo.
    """

    def __init__(self) -> None:
        self._vain = 0
        """Number of sums to leave out after the next wait in vain."""
        self._left_out = 0

    def ended(self, work: Any) -> bool:
        """Return True if a reduction has completed, now or within a moment.

        Args:
            work: A reduction in flight.

        Returns:
            False if it is still in flight. The caller finds out whether it has failed.
        """
        if work.is_completed():
            return True
        if self._left_out:
            self._left_out -= 1
            return False
        with suppress(RuntimeError):  # it takes longer or has failed: the caller checks
            work.wait(SOON)
        ended = bool(work.is_completed())
        self._vain = 0 if ended else min(2 * self._vain + 1, VAIN_MAX)
        self._left_out = self._vain
        return ended


class GlooTransport(TorchDistTransport):
    """gloo between host buffers."""

    name: ClassVar[str] = "gloo"
    same_bits: ClassVar[bool] = True

    def __init__(self, *, host: str) -> None:
        super().__init__()
        self._rendezvous = Rendezvous(host)
        self._rendezvous_lock = threading.Lock()
        self._connections = PeerConnections()
        self._short_wait = _ShortWait()
        # A device is gloo's event thread and listener. One serves all groups of a process.
        self._device: Any = ProcessGroupGloo.create_device(hostname=host)

    @property
    def address(self) -> str:
        """Address of this process's rendezvous."""
        return self._rendezvous.address

    def _connect(self, group: Group, deadline: Deadline) -> Any:
        # These private names are the only way to choose the address that gloo binds to.
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [self._device]  # noqa: SLF001
        options._threads = THREADS  # noqa: SLF001
        options._timeout = timedelta(seconds=deadline.timeout_s)  # noqa: SLF001
        store = _Exchange(self._rendezvous, self._rendezvous_lock, group, deadline)
        try:
            # If a peer dies after the exchange, gloo retries it until the timeout. The thread of
            # this attempt is left behind then, so it must not hold the lock here.
            process_group = ProcessGroupGloo(store, group.rank, group.size, options)
        except BaseException:
            store.connections.close()
            raise
        return process_group, store.connections

    def allreduce_staged(
        self,
        buffer: torch.Tensor,
        stage: Stage,
        abort: Abort,
        algorithm: str,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Sum a buffer piece by piece while the stage fills the next pieces."""
        assert residual is None, "gloo sums in the type that travels"
        data, length = buffer.detach(), STAGE_BYTES // buffer.element_size()
        pieces = [data[low : low + length] for low in range(0, max(len(data), 1), length)]
        if self._process_group is None or len(pieces) == 1:
            super().allreduce_staged(buffer, stage, abort, algorithm)
            return
        under_way: list[Any] = []
        made = done = 0
        with self._abandoning(buffer):
            for piece in pieces:
                stage.make(made, made + piece.nbytes)
                made += piece.nbytes
                under_way.append(self._launch("allreduce", piece, dist.ReduceOp.SUM))
                self._works = under_way
                if len(under_way) > STAGES:
                    self._finish(under_way, abort, None, count=1)
                    under_way = under_way[1:]
                    done += pieces[0].nbytes
                    stage.take(done)
            self._finish(under_way, abort, None)

    def _await(self, works: list[Any], abort: Abort, deadline: Deadline | None) -> None:
        if all(self._short_wait.ended(work) for work in works):
            return
        # Check futures, not works: a work is complete only after its callbacks have run.
        futures = [work.get_future() for work in works]
        for future in futures:
            future.add_done_callback(lambda _: abort.wake())
        lost_since_ns = 0
        while not all(future.done() for future in futures):
            if abort.wait(LOOK_S):
                return
            if deadline is not None:
                deadline.check("comparing bits")
            lost = self._connections.lost()
            if lost is not None:
                lost_since_ns = lost_since_ns or now_ns()
                if now_ns() - lost_since_ns > LAST_WORDS_NS:
                    raise PeerLost(f"rank {lost} has gone", lost)

    def _adopt(self, made: Any) -> Any:
        process_group, self._connections = made
        return process_group

    def peer_connections(self) -> Sequence[tuple[int, int]]:
        """Return the rendezvous connections of the group, which close with the peers."""
        return [(fd, rank) for fd, rank, _ in self._connections.watched()]

    def close(self) -> None:
        """Leave the group and close its connections."""
        super().close()
        self._connections.close()

    def shutdown(self) -> None:
        """Leave the group and free the listener and gloo's device."""
        self.close()
        self._rendezvous.close()
        self._device = None
