"""Reduces device memory that a transport cannot reach, by way of host memory that it can.

The buffers are cut into pieces, which go through a ring of pinned host buffers in three stages that
overlap:

    device to host     piece i + 1    queued on a stream of its own
    the sum            piece i        on the host, by the transport
    host to device     piece i - 1    queued on another stream

The cuts depend on sizes and types alone. As soon as one rank of a group needs the ring, all ranks
make the same cuts, so the transport is given the same buffers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import torch

from paceline.transport.base import Abort, TransportAborted
from paceline.transport.device_queues import DeviceEvent, Queues, Stream, TorchQueues, mark, until

PIECE_BYTES: Final = 1 << 20
"""Size of a piece in bytes, all its buffers together. A quarter of a segment on a GPU: enough
pieces to keep each stage busy, and each long enough that launching a copy (some 10 us) is little
beside it."""
STAGES: Final = 3
ALIGNMENT_BYTES: Final = 64

Piece = Sequence[torch.Tensor]
Sum = Callable[[Piece], None]


def cut(buffers: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the pieces in which buffers are reduced. Each piece is a list of views.

    Small buffers are reduced together, all at once. Larger ones are reduced one after the other, in
    pieces.

    Args:
        buffers: Flat tensors.

    Yields:
        Views of the buffers, at most PIECE_BYTES together, unless one element is larger.
    """
    if sum(buffer.nbytes for buffer in buffers) <= PIECE_BYTES:
        yield [buffer.detach() for buffer in buffers]
        return
    for buffer in buffers:
        yield from cut_alike([buffer])


def cut_alike(buffers: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the pieces of buffers of equal length. Each piece has the same range of all of them.

    Args:
        buffers: Flat tensors of the same length.

    Yields:
        One view of each buffer.
    """
    length = buffers[0].numel()
    step = max(1, PIECE_BYTES // sum(buffer.element_size() for buffer in buffers))
    for start in range(0, length, step):
        yield [buffer.detach()[start : start + step] for buffer in buffers]


class _Lane:
    """The two copy streams of one device.

    There are none if copies are done when the call returns.
    """

    def __init__(self, queues: Queues, device: torch.device) -> None:
        self.queues, self.device = queues, device
        self.down: Stream | None = None
        self.up: Stream | None = None
        if queues.has(device):
            self.down, self.up = queues.stream(device), queues.stream(device)

    def copy(
        self, stream: Stream | None, target: torch.Tensor, source: torch.Tensor
    ) -> DeviceEvent | None:
        """Copy a tensor in a stream. Return the event behind the copy, or None if it is done."""
        if stream is None:
            target.copy_(source)
            return None
        with self.queues.use(stream):
            target.copy_(source, non_blocking=True)
        return mark(self.queues, self.device, stream)


class _Slot:
    """One buffer of the ring and the piece that it holds."""

    def __init__(self, *, pinned: bool) -> None:
        size = PIECE_BYTES + ALIGNMENT_BYTES
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.piece: Piece = ()
        self.hosts: list[torch.Tensor] = []
        self.down: list[DeviceEvent] = []
        self.up: dict[torch.device, DeviceEvent] = {}
        """Event behind the copy of the last piece to each device. The next piece overwrites that
        memory."""

    def take(self, piece: Piece) -> None:
        """Lay out host buffers for the piece, each on its own cache line."""
        self.piece, self.hosts, end = piece, [], 0
        for buffer in piece:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = start + buffer.nbytes
            if end > len(self._bytes):  # many small buffers, padded to cache lines
                self._bytes = torch.empty(
                    end, dtype=torch.uint8, pin_memory=self._bytes.is_pinned()
                )
            self.hosts.append(self._bytes[start:end].view(buffer.dtype))


class Staging:
    """Host buffers that stand in for device buffers during a reduction.

    The ring is kept between calls. It is dropped after a call that failed, since an abandoned
    operation may still write to it.
    """

    def __init__(self, queues: Queues | None = None) -> None:
        self._queues = queues or TorchQueues()
        self._lanes: dict[torch.device, _Lane] = {}
        self._ring: list[_Slot] = []

    def reduce(self, by: Sum, pieces: Iterable[Piece], abort: Abort) -> None:
        """Sum each piece through host memory.

        The copies follow what the caller has queued in its current stream, and what the caller
        queues there afterwards sees the sums.

        Args:
            by: Sums the host buffers of one piece, in place.
            pieces: Views of device buffers, as `cut` makes them.
            abort: Ends the call with TransportAborted when it is raised.
        """
        ring, self._ring = self._ring, []  # dropped if the call fails
        before: _Slot | None = None
        for number, piece in enumerate(pieces):
            if number < STAGES and number == len(ring):
                ring.append(_Slot(pinned=any(buffer.is_cuda for buffer in piece)))
            slot = ring[number % STAGES]
            self._down(slot, piece, abort)
            if before is not None:
                self._sum(by, before, abort)
            before = slot
        if before is not None:
            self._sum(by, before, abort)
        for lane in self._lanes.values():
            if lane.up is not None:
                summed = mark(self._queues, lane.device, lane.up)
                self._queues.current(lane.device).wait_event(summed)
        self._ring = ring

    def _down(self, slot: _Slot, piece: Piece, abort: Abort) -> None:
        if any(self._lane(buffer.device).down is None for buffer in piece):
            self._until(slot.up.values(), abort)  # a synchronous copy follows no stream
        slot.take(piece)
        slot.down = []
        for host, buffer in zip(slot.hosts, piece, strict=True):
            lane = self._lane(buffer.device)
            if lane.down is not None:
                filled = mark(self._queues, lane.device, self._queues.current(lane.device))
                lane.down.wait_event(filled)
                for event in slot.up.values():
                    lane.down.wait_event(event)
            done = lane.copy(lane.down, host, buffer)
            slot.down += [done] if done is not None else []
        slot.up = {}

    def _sum(self, by: Sum, slot: _Slot, abort: Abort) -> None:
        self._until(slot.down, abort)
        by(slot.hosts)
        for host, buffer in zip(slot.hosts, slot.piece, strict=True):
            lane = self._lane(buffer.device)
            done = lane.copy(lane.up, buffer, host)
            if done is not None:
                slot.up[lane.device] = done

    @staticmethod
    def _until(events: Iterable[DeviceEvent], abort: Abort) -> None:
        def watch() -> None:
            if abort.is_raised():
                raise TransportAborted("abandoned in a copy from or to a device")

        until(events, watch)

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(self._queues, device)
        return self._lanes[device]
