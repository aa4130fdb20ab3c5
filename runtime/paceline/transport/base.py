"""The interface of every data channel, and the promises that each implementation keeps.

A transport sums flat buffers over the members of a *group* (the members of one generation). In a
running job the calls never overlap, but they come from several threads: the main thread begins
training, the communication thread opens and closes groups and reduces whole rounds, and the data
thread reduces the segments of a streamed round (`worker.reduction`). The tests in `tests/transport`
hold every implementation to these promises, including the in-memory one of the simulation:

1. The sum is exact up to one fixed order of additions and has the same bits on all members (R23).

2. A call never outlives its `Abort`. A peer that is dead, stopped or absent blocks nobody
(docs/design/data-channel.md).

3. An abandoned call may still write to scratch memory of the transport, or to the buffer of that
call, which the caller gives up. It may write to nothing else. A new group beside an abandoned one
works (R4, I13).

4. Nothing spins while no call is in flight.

5. Buffers on a device are read after everything that is queued in the calling thread's current
stream, and whatever that stream queues afterwards sees the sums (D5).
"""

from __future__ import annotations

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from paceline.core.collectives.conduct import Conduct
from paceline.core.collectives.select import CLASS_BYTES, CLASS_NAMES, NATIVE, Method

HOST: Final = torch.device("cpu")


class TransportError(Exception):
    """Raised when a data channel fails. The round is not committed and the group must be closed."""


class TransportAborted(TransportError):
    """Raised when the abort flag ends a call, for example since a new generation is forming."""


class PeerLost(TransportError):
    """Raised when a peer of the group is gone or unreachable.

    `rank` is its group index, or None.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Abort:
    """A flag that another thread raises to end a blocking call.

    It also wakes a thread that waits.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.flag = ctypes.c_int32(0)
        """Flag for native code that waits without the interpreter lock. 0 means not raised."""
        self._lock = threading.Lock()
        self._eventfds: list[int] = []

    def raise_(self) -> None:
        """Raise the flag and wake a waiting thread. Any thread may call it."""
        self.flag.value = 1
        self._event.set()
        with self._lock:
            for fd in self._eventfds:
                os.eventfd_write(fd, 1)

    @contextmanager
    def waking(self, eventfd: int) -> Iterator[None]:
        """Make a raised flag also write to an eventfd that the caller polls, while the block runs.

        Args:
            eventfd: Descriptor of the caller. The caller keeps it open until the block ends.

        Yields:
            Nothing.
        """
        with self._lock:
            self._eventfds.append(eventfd)
        try:
            yield
        finally:
            with self._lock:
                self._eventfds.remove(eventfd)

    def clear(self) -> None:
        """Lower the flag, when the communication thread has taken every order that raised it."""
        self.flag.value = 0
        self._event.clear()

    def is_raised(self) -> bool:
        """Return True if the flag is up. Any thread may ask."""
        return self.flag.value != 0

    def wake(self) -> None:
        """End the present wait, or the next one, without raising the flag.

        Any thread may call it.
        """
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Block in the kernel until the flag is raised, `wake()` is called or the timeout expires.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            True if the flag is raised.
        """
        self._event.wait(timeout_s)
        if not self.is_raised():
            self._event.clear()
            if self.is_raised():  # raised meanwhile: keep the event set
                self._event.set()
        return self.is_raised()


@dataclass(frozen=True, slots=True)
class Peer:
    """One member of a group, as the data channel needs to know it."""

    name: str
    """Stable identity of the process (a member id). Links are cached by it."""
    address: str
    """Text that the process published as its `Transport.address`."""


@dataclass(frozen=True, slots=True)
class Group:
    """The members of one generation, in rank order."""

    key: str
    """Unique text of the generation id. Every message and every communicator carries it (R1)."""
    number: int
    """A number that grows with every generation of this job, used for tags. Not unique by itself.
    """
    peers: tuple[Peer, ...]
    rank: int
    """Index of this process in `peers`."""
    secret: bytes = field(default=b"", repr=False)
    """Shared secret of the processes of this job (`rendezvous.secret_of`). Peers use it to prove
    that they belong to the job. Empty only for ranks without a token, as in tests."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.peers)


@dataclass(frozen=True, slots=True)
class NativeStage:
    """A `Stage` in C: functions that take `owner` as first argument and byte offsets as int64."""

    make: int
    take: int
    owner: int
    keeps: Any
    """Keeps the memory behind the addresses alive."""


class Stage:
    """Fills a buffer piece by piece while other pieces are summed, and receives sums early.

    This base class is for a buffer that is complete from the start: it fills nothing, and it
    ignores finished sums.
    """

    native: NativeStage | None = None

    def make(self, low: int, high: int) -> None:
        """Fill the bytes low..high of the buffer.

        Called once for each byte, before the byte is read.
        """

    def take(self, done: int) -> None:
        """Receive the news that all bytes below `done` are summed.

        May be called any number of times.
        """


class Transport(ABC):
    """A data channel between ranks.

    Life cycle: `begin` -> `address` -> (`open` -> `allreduce`* -> `close`)* -> `shutdown`.

    Calls never overlap in a running job. `begin` runs on the main thread, `open`, `close` and
    `shutdown` on the communication thread, and the reductions on the communication thread or on the
    data thread.
    """

    name: ClassVar[str]
    algorithms: ClassVar[tuple[str, ...]] = (NATIVE,)
    """Values that `allreduce` accepts as `algorithm`. The same on all ranks."""
    sums_in_place: ClassVar[bool] = False
    """True if the transport reduces buffers made by its own `zeros` without a copy."""
    rounds: ClassVar[bool] = False
    """True if the transport has `allreduce_rounded`."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Address at which peers reach this process. Final once training has begun."""

    def begin(  # noqa: B027 (most need nothing)
        self, devices: Collection[torch.device], largest_bytes: int = CLASS_BYTES[-1]
    ) -> None:
        """Prepare for the buffers of this job. Main thread, before any `open`.

        It raises TransportError if the transport cannot serve these devices.

        Args:
            devices: Devices of the parameters, and so of most buffers.
            largest_bytes: Size in bytes that few buffers exceed. The same on all ranks.
        """

    def moves(self, device: torch.device) -> bool:
        """Return True if the transport reaches the memory of this device itself.

        Buffers in memory that it does not reach can go through host memory (`transport.staging`).

        Args:
            device: Where a buffer lies.

        Returns:
            True if `allreduce` takes such a buffer.
        """
        return device.type == HOST.type

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new flat buffer for sums, filled with zeros. Main or communication thread.

        `allreduce` accepts it like any other buffer, and a transport with `sums_in_place` reduces
        it without a copy. Either all ranks get their buffers here, or none does. It raises
        TransportError if no memory can be had, and LimitError for more than the pod may have.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            device: Where the buffer lies.

        Returns:
            A tensor of shape (numel,) that the caller owns.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def unfit(self, addresses: Sequence[str]) -> str:  # noqa: ARG002
        """Return the reason why the processes at these addresses cannot form a group.

        All ranks know the same addresses, so all of them get the same answer.

        Args:
            addresses: `Transport.address` of each rank, in rank order.

        Returns:
            The reason, or an empty text if they can form a group.
        """
        return ""

    @abstractmethod
    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        """Wire the missing links of a group and return when this rank can reduce in it.

        Communication thread. A failed open leaves the transport usable for the next group.

        Args:
            group: The members, with this process at `group.rank`.
            abort: Ends the call with TransportAborted when it is raised.
            timeout_s: Seconds after which a peer that cannot be reached ends the call with
                PeerLost.

        Raises:
            TransportError: The group cannot be wired.
        """

    @abstractmethod
    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str) -> None:
        """Sum each buffer over the group, in place, with the same bits on every rank.

        Communication thread or data thread. All ranks pass the same number of buffers, of the same
        sizes and dtypes, and the same algorithm. After a TransportError the contents of the buffers
        are undefined and may still be written to: the caller gives the buffers up and closes the
        group.

        Args:
            buffers: Flat, contiguous tensors. The transport uses their memory until the call
                returns.
            abort: Ends the call with TransportAborted when it is raised.
            algorithm: One of `algorithms`.

        Raises:
            TransportError: The sums are not complete.
        """

    def allreduce_in_turn(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
        summed: Callable[[], None],
    ) -> None:
        """Sum each buffer as if by one `allreduce` call each, in this order and with the same bits.

        A later buffer may be in flight before an earlier one is complete. Ranks need not have the
        same number of buffers in flight. Threads and errors are those of `allreduce`.

        Args:
            buffers: Flat, contiguous tensors.
            abort: Ends the call with TransportAborted when it is raised.
            algorithm: One of `algorithms`.
            summed: Called on the calling thread once for each complete buffer, in order.
        """
        for buffer in buffers:
            self.allreduce([buffer], abort, algorithm)
            summed()

    def allreduce_rounded(
        self,
        buffers: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
    ) -> None:
        """Sum float32 buffers that travel as bfloat16.

        Each hop adds in float32, and the result has bfloat16 values, unless nothing travels. Over
        all ranks, the results plus what was added to the residuals equals the sum of the inputs.
        After an error the contents of the buffers and residuals are undefined, but nothing writes
        to them any more. Threads are those of `allreduce`.

        Args:
            buffers: Flat, contiguous float32 tensors.
            residuals: One float32 tensor for each buffer, of the same length. The rounding error of
                this rank is added to it.
            abort: Ends the call with TransportAborted when it is raised.
            algorithm: One of `algorithms`.

        Raises:
            NotImplementedError: The transport sums in the type that travels (`rounds` is False).
        """
        raise NotImplementedError(f"{self.name} sums in the type that travels")

    def allreduce_staged(
        self,
        buffer: torch.Tensor,
        stage: Stage,
        abort: Abort,
        algorithm: str,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Sum one buffer whose contents a stage produces while the call runs.

        It works like `allreduce`, or like `allreduce_rounded` if there is a residual. Ranks need
        not have the same kind of stage.

        Args:
            buffer: Flat, contiguous tensor.
            stage: Fills the buffer and receives finished sums.
            abort: Ends the call with TransportAborted when it is raised.
            algorithm: One of `algorithms`.
            residual: float32 tensor of the buffer's length that receives the rounding error, or
                None.
        """
        stage.make(0, buffer.nbytes)
        if residual is None:
            self.allreduce([buffer], abort, algorithm)
        else:
            self.allreduce_rounded([buffer], [residual], abort, algorithm)

    def peer_connections(self) -> Sequence[tuple[int, int]]:
        """Return connections that become readable once the rank at the other end has left.

        Returns:
            Pairs (descriptor, rank) for poll. The descriptors stay the transport's own until
            `close`.
        """
        return ()

    @abstractmethod
    def close(self) -> None:
        """Leave the group without waiting for anybody, since peers may be dead. Idempotent."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free ports and files, with no collective call and no waiting (D6). Idempotent."""

    def methods(self) -> tuple[Method, ...]:
        """Return the method that moves the buffers of each size class."""
        return (Method(self.name),) * len(CLASS_NAMES)

    def machines(self) -> tuple[int, ...]:
        """Return the machine of each rank of the group if sums have two levels.

        Returns:
            One number for each rank, counted in the order in which machines first appear. Empty if
            sums have one level.
        """
        return ()

    def conducts(self) -> tuple[Conduct, ...]:
        """Return how the transport sums in the present group.

        Returns:
            One value for each transport in use: a transport that selects among several has one for
            each that is chosen.
        """
        return (Conduct(self.name),)

    def reasons(self) -> tuple[str, ...]:
        """Return why each size class uses its method, as text. Empty if there was no choice."""
        return ()

    def regrets_s(self) -> tuple[float, ...]:
        """Return the seconds per reduction that this rank loses by the choice, per size class."""
        return (0.0,) * len(CLASS_NAMES)

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Return facts for the log by name, such as the choice per size class and the provider."""
