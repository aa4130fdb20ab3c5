"""The commands that one rank of the conformance suite executes, in a process or in a thread.

A rank owns its transports and one abort flag. Its data are a function of (seed, rank, buffer), so
that the test can compute the expected sum without moving any data.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from paceline.core.collectives.select import Method
from paceline.transport.base import Abort, Group, Peer, PeerLost, Transport, TransportError
from paceline.transport.selected import SelectedTransport

OPEN_TIMEOUT_S = 10.0
ENDLESS = 1_000_000
LINKS_ARE_WARM = 3


@dataclass(frozen=True)
class Payload:
    """The data that every rank reduces: `numels` buffers of one dtype, `calls` times in a row."""

    seed: int
    numels: tuple[int, ...]
    dtype: str = "float32"
    exact: bool = True
    """Use small integers, whose sum is the same in any order, instead of arbitrary floats."""
    calls: int = 1
    one_by_one: bool = False
    """Reduce each buffer in a call of its own, like the segments of a streamed round."""
    in_turn: bool = False
    """Reduce one buffer after another in one call, so that the transport may start one early."""
    in_place: bool = False
    """Allocate buffers where the transport wants them, like those of gradients."""
    tells: bool = False
    """Report each reduction when the rank enters it, for `Rank.wait_entered`."""

    def parts(self, rank: int, call: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1009 + rank * 31 + call)
        kind: torch.dtype = getattr(torch, self.dtype)
        parts = []
        for numel in self.numels:
            if self.exact or not kind.is_floating_point:
                part = torch.randint(-8, 9, (numel,), generator=generator)
            else:
                part = torch.randn(numel, generator=generator, dtype=torch.float64)
            parts.append(part.to(kind))
        return parts


def digest(buffers: Sequence[torch.Tensor]) -> str:
    """Return a hash of the bits of some buffers."""
    sha = hashlib.sha256()
    for buffer in buffers:
        sha.update(buffer.cpu().view(torch.uint8).numpy().tobytes() if buffer.numel() else b"")
        sha.update(b"|")
    return sha.hexdigest()


@dataclass
class Outcome:
    """The result of one command."""

    value: Any = None
    error: str = ""
    message: str = ""
    lost_rank: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Entered:
    """The rank is about to call its transport for the `number`th time in this command."""

    number: int


def tell_nobody(_: Entered) -> None:
    """Discard the report."""


ROUNDED = "-bfloat16"
"""The suffix of a kind, before its algorithm, that sends float32 as bfloat16."""
LARGEST_BYTES = 1 << 20
"""The largest buffer of a test's model, so that no large size classes are measured."""


@dataclass
class RankBody:
    """One rank; `make` builds a transport by its kind, which is named like a candidate."""

    make: Callable[[str], Transport]
    abort: Abort = field(default_factory=Abort)
    transports: dict[str, Transport] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of its buffers."""
    tell: Callable[[Entered], None] = tell_nobody
    """Sends a report to the test while a command is running."""

    def run(self, command: str, *arguments: Any) -> Outcome:
        start = time.monotonic()
        outcome = Outcome()
        try:
            outcome.value = getattr(self, "do_" + command)(*arguments)
        except TransportError as error:
            outcome.error, outcome.message = type(error).__name__, str(error)
            outcome.lost_rank = error.rank if isinstance(error, PeerLost) else None
        except Exception as error:
            outcome.error, outcome.message = "bug", repr(error)
        outcome.seconds = time.monotonic() - start
        return outcome

    def raise_abort(self) -> None:
        self.abort.raise_()

    def _of(self, kind: str) -> Transport:
        if kind not in self.transports:
            self.transports[kind] = self.make(kind)
            self.transports[kind].begin([self.device], LARGEST_BYTES)
        return self.transports[kind]

    def do_pid(self) -> int:
        return os.getpid()

    def do_use(self, device: str) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def do_address(self, kind: str) -> str:
        return self._of(kind).address

    def do_open(
        self,
        kind: str,
        key: str,
        number: int,
        peers: list[tuple[str, str]],
        rank: int,
        timeout_s: float = OPEN_TIMEOUT_S,
        tells: bool = False,
    ) -> None:
        group = Group(key, number, tuple(Peer(*peer) for peer in peers), rank)
        if tells:
            self.tell(Entered(1))
        self._of(kind).open(group, self.abort, timeout_s)

    def do_break(self, kind: str, name: str) -> None:
        """Make this rank unable to connect one of the candidates of a selected transport."""

        def refuse(*_: Any) -> None:
            raise TransportError(f"{name} does not work here")

        selected = self._of(kind)
        assert isinstance(selected, SelectedTransport)
        setattr(selected._transports[name], "open", refuse)  # noqa: B010

    def do_forget(self, kind: str) -> None:
        """Forget the measurements of this rank and of others."""
        selected = self._of(kind)
        assert isinstance(selected, SelectedTransport)
        selected._measured.clear()

    def do_allreduce(self, kind: str, rank: int, payload: Payload) -> list[str]:
        """Return the digests of the sums, one per call."""
        digests, entered = [], 0
        for call in range(payload.calls):
            buffers = [part.to(self.device) for part in payload.parts(rank, call)]
            if payload.in_place:
                buffers = [self._placed(kind, buffer) for buffer in buffers]
            method = Method.of(kind)
            for together in [[x] for x in buffers] if payload.one_by_one else [buffers]:
                entered += 1
                if payload.tells:
                    self.tell(Entered(entered))
                if method.transport.endswith(ROUNDED) and together[0].dtype is torch.float32:
                    self._reduce_rounded(kind, together)
                elif payload.in_turn:
                    self._reduce_in_turn(kind, together)
                else:
                    self._of(kind).allreduce(together, self.abort, method.algorithm)
            digests.append(digest(buffers))
        return digests

    def do_allreduce_checked(self, kind: str, rank: int, size: int, numel: int) -> None:
        """Reduce until a reduction fails. Each that ends must have the numbers of all ranks."""
        buffer = torch.empty(numel)
        for call in range(ENDLESS):
            if call == LINKS_ARE_WARM:
                self.tell(Entered(call))
            buffer.fill_(call + rank)
            self._of(kind).allreduce([buffer], self.abort, Method.of(kind).algorithm)
            expected = size * call + size * (size - 1) / 2
            wrong = int((buffer != expected).sum())
            assert not wrong, f"{wrong} of {numel} sums are wrong in call {call}"

    def _placed(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        return self._of(kind).zeros(len(buffer), buffer.dtype, buffer.device).copy_(buffer)

    def _reduce_in_turn(self, kind: str, buffers: list[torch.Tensor]) -> None:
        reported: list[int] = []
        self._of(kind).allreduce_in_turn(
            buffers, self.abort, Method.of(kind).algorithm, lambda: reported.append(len(reported))
        )
        assert len(reported) == len(buffers), "somebody waits to hear that a buffer is summed"

    def _reduce_rounded(self, kind: str, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        residuals = [torch.zeros_like(buffer) for buffer in buffers]
        algorithm = Method.of(kind).algorithm
        self._of(kind).allreduce_rounded(buffers, residuals, self.abort, algorithm)
        return residuals

    def do_allreduce_rounded(self, kind: str, rank: int, payload: Payload) -> tuple[str, str]:
        """Return the digests of the sums and of the local rounding residuals."""
        buffers = payload.parts(rank)
        residuals = self._reduce_rounded(kind, buffers)
        return digest(buffers), digest(residuals)

    def do_resident_mib(self) -> float:
        """Return the resident memory of this process in MiB."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20

    def do_close(self, kind: str) -> None:
        self._of(kind).close()

    def do_shutdown(self, kind: str) -> None:
        self.transports.pop(kind).shutdown()

    def do_describe(self, kind: str) -> dict[str, str]:
        return self._of(kind).describe()

    def do_machines(self, kind: str) -> tuple[int, ...]:
        return self._of(kind).machines()

    def do_reasons(self, kind: str) -> list[str]:
        return list(self._of(kind).reasons())

    def do_clear_abort(self) -> None:
        self.abort.clear()

    def do_idle_cpu(self, seconds: float) -> float:
        """Return the CPU seconds that this process uses while nothing is running."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before
