"""Pieces of buffers on their way through the steps of a schedule.

A lane works off its pieces one after another, with at most one receive and one send in flight.
Lanes do not depend on each other, so they may advance in any order. Within a lane both ends of a
link post the same messages in the same order, which is all that matching needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from paceline.core.collectives.schedules import Rounding, ScheduleStep, bounds
from paceline.transport.base import PeerLost, TransportError
from paceline.transport.mpi.links import LANES, Link

PIECE_BYTES: Final = 1 << 20
ADD_ELEMENTS: Final = 1 << 15
"""Largest addition in elements. Above it torch starts its thread pool, whose threads would spin
after each addition."""
CUT_OFF: Final = "rank {} broke off a message"
_FRAME: Final = re.compile(r"^\w+\(\d+\)\.*: ?")
"""What a line of MPICH's error stack begins with: a function, its line and dots."""
_NUMPY_TYPES: Final = {torch.float32, torch.float64, torch.int32, torch.int64}


def failed_call(text: str) -> str:
    """Return the message for a call of MPI that failed, as one line.

    Args:
        text: MPI's error string. MPICH's has a line for each of its functions, the cause last.
    """
    lines = [_FRAME.sub("", line).strip() for line in text.splitlines()]
    written = [line for line in lines if line]
    what = written[0].removesuffix(", error stack:") if written else "no reason given"
    cause = f": {written[-1]}" if len(written) > 1 else ""
    return f"a call of MPI failed: {what}{cause}"


class LaneScratch:
    """Memory of the lanes: one incoming piece each, and half a piece for outgoing bfloat16."""

    def __init__(self) -> None:
        self.arriving = [np.empty(PIECE_BYTES, np.uint8) for _ in range(LANES)]
        self.leaving = [np.empty(PIECE_BYTES // 2, np.uint8) for _ in range(LANES)]


class Cells:
    """One flat buffer, as bytes for the messages and as numbers for the additions."""

    residual: torch.Tensor | None = None

    def __init__(self, buffer: torch.Tensor) -> None:
        if buffer.device.type != "cpu":
            raise TransportError(
                f"mpi moves host memory only, this buffer is on {buffer.device}; "
                "hint: set spec.collective.backend: nccl"
            )
        assert buffer.dim() == 1, tuple(buffer.shape)
        assert buffer.is_contiguous(), buffer.stride()
        self.tensor = buffer.detach()
        self.itemsize = buffer.element_size()

    # Lazy, since the native loop needs neither.

    @cached_property
    def bytes(self) -> Any:
        """The buffer as a numpy array of bytes. The native loop does not need it."""
        tensor = self.tensor
        return tensor.view(torch.uint8).numpy() if len(tensor) else np.empty(0, np.uint8)

    @cached_property
    def numbers(self) -> Any:
        """The buffer as a numpy array of its type, or None if numpy has no such type."""
        return self.tensor.numpy() if self.tensor.dtype in _NUMPY_TYPES else None

    def wire_bytes(self, count: int) -> int:
        """Return the size of a message for `count` bytes of the buffer."""
        return count

    def landing(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> Any:
        """Return where the message for the bytes low..high is received."""
        return scratch[: high - low] if step.reduce else self.bytes[low:high]

    def message(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> Any:  # noqa: ARG002
        """Return the bytes low..high as they travel. `scratch` may be used for the message."""
        return self.bytes[low:high]

    def landed(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> None:
        """Add or keep the received message for the bytes low..high."""
        if step.reduce:
            self._add(low, high, scratch)

    def _add(self, low: int, high: int, scratch: Any) -> None:
        """Add the first bytes of `scratch` to the bytes low..high of the buffer."""
        first, last = low // self.itemsize, high // self.itemsize
        if self.numbers is not None:
            own = self.numbers[first:last]
            np.add(own, scratch[: high - low].view(own.dtype), out=own)
            return
        incoming = torch.from_numpy(scratch[: high - low]).view(self.tensor.dtype)
        for start in range(0, last - first, ADD_ELEMENTS):
            end = min(start + ADD_ELEMENTS, last - first)
            self.tensor[first + start : first + end].add_(incoming[start:end])


class RoundedCells(Cells):
    """A float32 buffer that travels as bfloat16. Sums are made in float32."""

    def __init__(self, buffer: torch.Tensor, residual: torch.Tensor) -> None:
        """Pair a buffer with its residual.

        Args:
            buffer: Flat float32 tensor in host memory.
            residual: float32 tensor of the same length. The rounding errors of this rank are added
                to it.
        """
        super().__init__(buffer)
        assert buffer.dtype is residual.dtype is torch.float32, (buffer.dtype, residual.dtype)
        assert buffer.shape == residual.shape, (buffer.shape, residual.shape)
        self.residual: torch.Tensor = residual.detach()

    def wire_bytes(self, count: int) -> int:
        """Return the size of a message for `count` bytes of the buffer: half of it."""
        return count // 2

    def landing(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> Any:  # noqa: ARG002
        """Return scratch memory of half the size, since bfloat16 arrives."""
        return scratch[: (high - low) // 2]

    def message(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> Any:
        """Round the bytes low..high in place as the step says, and return them as bfloat16."""
        own = self._round(low, high, step.sent)
        leaving = scratch[: (high - low) // 2]
        leaving.view(np.uint16)[:] = own.view(np.uint32) >> 16
        return leaving

    def landed(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> None:
        """Widen the received numbers, add or keep them, and round the result as the step says."""
        came = scratch[: (high - low) // 2].view(np.uint16).astype(np.uint32)
        came <<= 16
        own = self.numbers[low // 4 : high // 4]
        if step.reduce:
            np.add(own, came.view(np.float32), out=own)
        else:
            own[:] = came.view(np.float32)
        self._round(low, high, step.made)

    def _round(self, low: int, high: int, how: Rounding) -> Any:
        """Round numbers to bfloat16 in place, to nearest with ties to even.

        Args:
            low: First byte of the range.
            high: Byte after the range.
            how: What to do with the rounding error.

        Returns:
            The numbers of the range, as a view of the buffer.
        """
        own = self.numbers[low // 4 : high // 4]
        if how is Rounding.EXACT:
            return own
        bits = own.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
        rounded &= np.uint32(0xFFFF0000)
        rounded[np.isnan(own)] = 0x7FC00000
        if how is Rounding.KEPT:
            kept = self.residual.numpy()[low // 4 : high // 4]
            np.add(kept, own - rounded.view(np.float32), out=kept)
        own[:] = rounded.view(np.float32)
        return own


class Piece:
    """A stretch of one buffer that goes through all steps independently."""

    __slots__ = ("at", "cells")

    def __init__(self, cells: Cells, low: int, high: int, chunks: int) -> None:
        self.cells = cells
        self.at = [cells.itemsize * (low + offset) for offset in bounds(high - low, chunks)]

    def span(self, chunk: int, width: int) -> tuple[int, int]:
        """Return where `width` neighboring chunks begin and end in the buffer, in bytes."""
        return self.at[chunk], self.at[chunk + width]

    @staticmethod
    def cut(cells: Cells, chunks: int) -> Iterator[Piece]:
        """Yield the pieces of a buffer, each of PIECE_BYTES at most."""
        length = PIECE_BYTES // cells.itemsize
        for low in range(0, len(cells.tensor), length):
            yield Piece(cells, low, min(low + length, len(cells.tensor)), chunks)


class Lane:
    """Works off pieces. It owns the request slots 2k (receive) and 2k + 1 (send)."""

    def __init__(
        self,
        index: int,
        pieces: Sequence[Piece],
        steps: Sequence[ScheduleStep],
        links: Mapping[int, Link],
        scratch: LaneScratch,
        mpi: Any,
    ) -> None:
        self._index = index
        self._todo = iter([(piece, step) for piece in pieces for step in steps])
        self._links = links
        self._arriving, self._leaving = scratch.arriving[index], scratch.leaving[index]
        self._byte = mpi.BYTE
        self._open = 0
        self._piece = pieces[0]
        self._step: ScheduleStep | None = None

    def post(self, requests: list[Any]) -> None:
        """Start the next step that has something to move.

        Null slots mean that all steps are done.
        """
        for piece, step in self._todo:
            self._open = 0
            low, high = piece.span(step.recv_chunk, step.width)
            if step.recv_from is not None and low < high:
                target = piece.cells.landing(low, high, self._arriving, step)
                link = self._links[step.recv_from]
                requests[2 * self._index] = link.comm.Irecv(
                    [target, self._byte], 0, link.tag(self._index)
                )
                self._open += 1
            low, high = piece.span(step.send_chunk, step.width)
            if step.send_to is not None and low < high:
                message = piece.cells.message(low, high, self._leaving, step)
                link = self._links[step.send_to]
                requests[2 * self._index + 1] = link.comm.Isend(
                    [message, self._byte], 0, link.tag(self._index)
                )
                self._open += 1
            if self._open:
                self._piece, self._step = piece, step
                return

    def received(self, status: Any) -> None:
        """Check that a receive which MPI calls complete has its data.

        It has none if the sender died in the middle of the message: MPICH completes such a receive
        as cancelled, and without an error.

        Args:
            status: Status of the receive, of the type `mpi4py.MPI.Status`.

        Raises:
            PeerLost: The message was broken off.
        """
        assert self._step is not None
        low, high = self._piece.span(self._step.recv_chunk, self._step.width)
        expected = self._piece.cells.wire_bytes(high - low)
        if status.Get_count(self._byte) != expected:
            sender = self._step.recv_from
            raise PeerLost(CUT_OFF.format(sender), sender)

    def arrived(self, requests: list[Any]) -> None:
        """Count a completed request of the step.

        After the last one, add and start the next step.
        """
        self._open -= 1
        if self._open:
            return
        step, piece = self._step, self._piece
        assert step is not None
        low, high = piece.span(step.recv_chunk, step.width)
        if step.recv_from is not None and low < high:
            piece.cells.landed(low, high, self._arriving, step)
        self.post(requests)
