"""Pieces of buffers on their way through the steps of a schedule.

A lane works off its pieces one after another, at most one receive and one send at a time. Lanes
do not know each other, so they may advance in any order; within a lane both ends of a link post the
same messages in the same order, which is all that matching needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from paceline.core.collectives.schedules import Rounding, ScheduleStep, bounds
from paceline.transport.base import TransportError
from paceline.transport.mpi.links import LANES, Link

PIECE_BYTES: Final = 1 << 20
ADD_ELEMENTS: Final = 1 << 15
"""Torch starts its thread pool above this many elements; its threads would spin after each add."""
_NUMPY_TYPES: Final = {torch.float32, torch.float64, torch.int32, torch.int64}


class Scratch:
    """Memory of the lanes, a piece each: for what comes in, and for what leaves in another type."""

    def __init__(self) -> None:
        self.arriving = [np.empty(PIECE_BYTES, np.uint8) for _ in range(LANES)]
        self.leaving = [np.empty(PIECE_BYTES // 2, np.uint8) for _ in range(LANES)]


class Cells:
    """One flat buffer: as bytes for the messages, as numbers for the additions."""

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

    # The native loop asks for neither.

    @cached_property
    def bytes(self) -> Any:
        tensor = self.tensor
        return tensor.view(torch.uint8).numpy() if len(tensor) else np.empty(0, np.uint8)

    @cached_property
    def numbers(self) -> Any:
        return self.tensor.numpy() if self.tensor.dtype in _NUMPY_TYPES else None

    def landing(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> Any:
        """Where the message for the bytes low..high goes."""
        return scratch[: high - low] if step.reduce else self.bytes[low:high]

    def message(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> Any:  # noqa: ARG002
        """What the bytes low..high travel as; `scratch` is free for it."""
        return self.bytes[low:high]

    def landed(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> None:
        """The message is complete."""
        if step.reduce:
            self._add(low, high, scratch)

    def _add(self, low: int, high: int, scratch: Any) -> None:
        """Add the first bytes of `scratch` to what lies at the bytes low..high."""
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
    """A float32 buffer that travels as bfloat16; sums are float32."""

    def __init__(self, buffer: torch.Tensor, residual: torch.Tensor) -> None:
        """`residual`: as long as the buffer; what rounding takes away here is added to it."""
        super().__init__(buffer)
        assert buffer.dtype is residual.dtype is torch.float32, (buffer.dtype, residual.dtype)
        assert buffer.shape == residual.shape, (buffer.shape, residual.shape)
        self.residual: torch.Tensor = residual.detach()

    def landing(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> Any:  # noqa: ARG002
        return scratch[: (high - low) // 2]

    def message(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> Any:
        own = self._round(low, high, step.sent)
        leaving = scratch[: (high - low) // 2]
        leaving.view(np.uint16)[:] = own.view(np.uint32) >> 16
        return leaving

    def landed(self, low: int, high: int, scratch: Any, step: ScheduleStep) -> None:
        came = scratch[: (high - low) // 2].view(np.uint16).astype(np.uint32)
        came <<= 16
        own = self.numbers[low // 4 : high // 4]
        if step.reduce:
            np.add(own, came.view(np.float32), out=own)
        else:
            own[:] = came.view(np.float32)
        self._round(low, high, step.made)

    def _round(self, low: int, high: int, how: Rounding) -> Any:
        """In place, to the nearest and ties to even; returns the numbers."""
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
    """A stretch of one buffer that goes through all steps on its own."""

    __slots__ = ("at", "cells")

    def __init__(self, cells: Cells, low: int, high: int, chunks: int) -> None:
        self.cells = cells
        self.at = [cells.itemsize * (low + offset) for offset in bounds(high - low, chunks)]

    def span(self, chunk: int, width: int) -> tuple[int, int]:
        """Where some neighbouring chunks begin and end in the buffer, in bytes."""
        return self.at[chunk], self.at[chunk + width]

    @staticmethod
    def cut(cells: Cells, chunks: int) -> Iterator[Piece]:
        length = PIECE_BYTES // cells.itemsize
        for low in range(0, len(cells.tensor), length):
            yield Piece(cells, low, min(low + length, len(cells.tensor)), chunks)


class Lane:
    """Works off pieces; owns the request slots 2k (receive) and 2k + 1 (send)."""

    def __init__(
        self,
        index: int,
        pieces: Sequence[Piece],
        steps: Sequence[ScheduleStep],
        links: Mapping[int, Link],
        scratch: Scratch,
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
        """Start the next step that has something to move; null slots mean that all is done."""
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

    def arrived(self, requests: list[Any]) -> None:
        """One of the step's requests is complete; after the last, add and go on."""
        self._open -= 1
        if self._open:
            return
        step, piece = self._step, self._piece
        assert step is not None
        low, high = piece.span(step.recv_chunk, step.width)
        if step.recv_from is not None and low < high:
            piece.cells.landed(low, high, self._arriving, step)
        self.post(requests)
