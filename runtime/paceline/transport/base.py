"""What every data channel promises, whatever moves the bytes.

A transport sums one flat buffer over the members of a *group* (one generation). It is driven by one
thread, the communication thread, and by nobody else. The promises, which `tests/transport` holds
every implementation to, the in-memory one of the simulation included:

1. The sum is exact up to one fixed order of additions and has the same bits on all members (R23).
2. A call never outlives its `Abort`: a dead, stopped or absent peer holds nobody
   (docs/design/data-channel.md).
3. What an abandoned call may still write to is scratch of the transport, or the buffer of that
   call, which the caller gives up; a new group beside an abandoned one works (R4, I13).
4. Nothing spins while no call is under way.
5. Buffers on a device are taken in the order of the calling thread's current stream, as what is
   queued there leaves them, and what it queues afterwards sees their sums (D5).
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
    """A data channel could not do its work; the round is not committed and the group is spent."""


class TransportAborted(TransportError):
    """The abort flag was raised while the call was under way (a new generation is being formed)."""


class PeerLost(TransportError):
    """A peer of the group is gone or unreachable. `rank` is its index in the group, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Abort:
    """A flag that another thread raises to end a blocking call; it also wakes a waiting one."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.flag = ctypes.c_int32(0)
        """The same for native code that waits without the interpreter lock: 0 = not raised."""
        self._lock = threading.Lock()
        self._eventfds: list[int] = []

    def raise_(self) -> None:
        self.flag.value = 1
        self._event.set()
        with self._lock:
            for fd in self._eventfds:
                os.eventfd_write(fd, 1)

    @contextmanager
    def waking(self, eventfd: int) -> Iterator[None]:
        """Inside, raising the flag also writes to this descriptor, which the caller may poll."""
        with self._lock:
            self._eventfds.append(eventfd)
        try:
            yield
        finally:
            with self._lock:
                self._eventfds.remove(eventfd)

    def clear(self) -> None:
        self.flag.value = 0
        self._event.clear()

    def is_raised(self) -> bool:
        return self.flag.value != 0

    def wake(self) -> None:
        """End a wait that is under way (or the next one) without raising: news has come."""
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Block in the kernel until raised, woken or `timeout_s` is over; true if raised."""
        self._event.wait(timeout_s)
        if not self.is_raised():
            self._event.clear()
            if self.is_raised():  # raised in between: the flag stays up
                self._event.set()
        return self.is_raised()


@dataclass(frozen=True, slots=True)
class Peer:
    """One member of a group as the data channel sees it."""

    name: str
    """Stable identity of the process (a member id); links are cached by it."""
    address: str
    """What that process published as its `Transport.address`."""


@dataclass(frozen=True, slots=True)
class Group:
    """The members of one generation, in rank order."""

    key: str
    """Unique text of the generation id; every message and every communicator carries it (R1)."""
    number: int
    """A number that grows with every generation of this job (for tags); not unique by itself."""
    peers: tuple[Peer, ...]
    rank: int
    """Index of this process in `peers`."""
    secret: bytes = field(default=b"", repr=False)
    """What only processes of this job know (`rendezvous.secret_of`): peers prove with it that they
    belong to the job. Empty only for ranks that no token was made for, as in tests."""

    @property
    def size(self) -> int:
        return len(self.peers)


@dataclass(frozen=True, slots=True)
class NativeStage:
    """A `Stage` in C: functions that take `owner` first, and bytes as int64."""

    make: int
    take: int
    owner: int
    keeps: Any
    """What the addresses lead to."""


class Stage:
    """Makes the numbers of a buffer piece by piece while others are summed, and takes the sums.
    This one finds all numbers there, and takes nothing early."""

    native: NativeStage | None = None

    def make(self, low: int, high: int) -> None:
        """Once for each byte, before it is read: now the bytes low..high of the buffer are."""

    def take(self, done: int) -> None:
        """All bytes below `done` are complete. On the way, and as often as one likes."""


class Transport(ABC):
    """A data channel between ranks.

    Life: `begin` -> `address` -> (`open` -> `allreduce`* -> `close`)* -> `shutdown`.
    """

    name: ClassVar[str]
    algorithms: ClassVar[tuple[str, ...]] = (NATIVE,)
    """What `allreduce` can be told to do; the same on all ranks."""
    sums_in_place: ClassVar[bool] = False
    """It takes what its own `zeros` makes without a copy."""
    rounds: ClassVar[bool] = False
    """It has `allreduce_rounded`."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where peers reach this process; final once training has begun."""

    def begin(  # noqa: B027 (most need nothing)
        self, devices: Collection[torch.device], largest_bytes: int = CLASS_BYTES[-1]
    ) -> None:
        """The parameters, and so most buffers, lie on `devices`; few buffers are larger than
        `largest_bytes`, the same on all ranks. Main thread, before any `open`.

        Raises TransportError if this can be no data channel for them."""

    def moves(self, device: torch.device) -> bool:
        """Whether it reaches this memory itself. What it does not can go through host memory."""
        return device.type == HOST.type

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new buffer for sums. `allreduce` takes it as any other, and some transports take it
        without a copy; then all ranks get theirs from here, or none does.

        Raises TransportError, and LimitError for more than the pod may have."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def unfit(self, addresses: Sequence[str]) -> str:  # noqa: ARG002
        """Why the processes at these addresses cannot be a group; empty if they can. The same on
        all ranks, which know the same addresses."""
        return ""

    @abstractmethod
    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        """Wire the missing links of `group`; returns when this rank can reduce in it.

        Raises TransportAborted when `abort` is raised, PeerLost when a peer cannot be reached
        within `timeout_s`. A failed open leaves the transport usable for the next group.
        """

    @abstractmethod
    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str) -> None:
        """Sum each flat, contiguous buffer over the group, in place, same bits on every rank.

        All ranks pass the same number of buffers, of the same sizes and dtypes, and the same one
        of `algorithms`. After any
        TransportError the contents of `buffers` are undefined, may still be written to, and the
        group is spent: `close` it.
        """

    def allreduce_in_turn(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
        summed: Callable[[], None],
    ) -> None:
        """As `allreduce` of each buffer in a call of its own, in this order and with the same bits;
        a later one may be under way before an earlier one is complete. `summed` hears of each that
        is, in order. Ranks need not have the same number under way."""
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
        """As `allreduce`, of float32 buffers that travel as bfloat16: sums are float32 at each hop,
        the result is bfloat16, unless nothing travels. What rounding takes away on this rank is
        added to `residuals`, each as long as its buffer: over all ranks, results and what was added
        make the sum of what came in. After an error their contents are undefined, but nothing
        writes to them any more.
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
        """As `allreduce`, or with a residual as `allreduce_rounded`, of one buffer whose numbers
        the stage makes. Ranks need not have the same kind of stage."""
        stage.make(0, buffer.nbytes)
        if residual is None:
            self.allreduce([buffer], abort, algorithm)
        else:
            self.allreduce_rounded([buffer], [residual], abort, algorithm)

    def peer_connections(self) -> Sequence[tuple[int, int]]:
        """Descriptors that can be read, by poll, once the rank beside them has left the group."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Leave the group without waiting for anybody (peers may be dead). Idempotent."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back ports and files; no collective call, no waiting (D6). Idempotent."""

    def methods(self) -> tuple[Method, ...]:
        """What moves the buffers of each size class (`core.collectives.select`)."""
        return (Method(self.name),) * len(CLASS_NAMES)

    def machines(self) -> tuple[int, ...]:
        """On which machine each rank of the group is where sums have two levels, by numbers in the
        order of the first ranks; empty where they have one."""
        return ()

    def conducts(self) -> tuple[Conduct, ...]:
        """How it sums in the present group; of several transports those that are chosen."""
        return (Conduct(self.name),)

    def reasons(self) -> tuple[str, ...]:
        """Why that was chosen for each size class, in words; empty if there was no choice."""
        return ()

    def regrets_s(self) -> tuple[float, ...]:
        """Seconds per reduction that this rank loses by the choice, for each size class."""
        return (0.0,) * len(CLASS_NAMES)

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Facts for `status`: algorithm per size class, provider, regret."""
