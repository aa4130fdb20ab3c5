"""Layout of parameters in flat memory that is cut into segments.

Gradients, results and committed weights share one `FlatLayout`. So an update is arithmetic between
equal flat tensors, a reduction moves a few large tensors instead of many small ones, and the bytes
of a state are the same on every rank. This module knows where a parameter lies; it owns no tensor.

Gradients have the type of their parameters, as autograd requires. A complex parameter lies here as
pairs of reals (`as_reals`). All that is summed or stepped is at least float32: for a bfloat16 or
float16 parameter the committed weights are the float32 master.

A *segment* is the unit of reduction: neighboring parameters of one data type and device. The
parameters that are registered last come first, since backward() makes their gradients first (R27).
The first segment is small, so that the reduction can begin early. Each segment is a tensor of its
own. Its last cells hold no parameter: they are zero, and stay zero in every buffer but the one that
is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import torch

ALIGNMENT_BYTES: Final = 64
"""Alignment of a parameter: each starts on a cache line, and the gaps stay zero."""
FIRST_BYTES: Final = 1 << 20
"""Size from which the first segment takes no further parameter, in bytes."""
SEGMENT_BYTES: Final = 4 << 20
"""Upper bound on a later segment of more than one parameter, in bytes. Measured (B10): little is
then left to reduce when backward() has ended, and a message is still long enough for the link."""
SEGMENT_BYTES_ON_CPU: Final = 25 << 20
"""Upper bound on a later segment where the cores that compute also reduce, in bytes: nothing is
hidden then, and each segment costs wake-ups."""


Zeros = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Makes a flat tensor of zeros, from a number of elements, data type and device."""


def plain_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return new zeroed memory from torch's own allocator."""
    return torch.zeros(numel, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    """The place of one parameter in flat memory."""

    name: str
    shape: torch.Size
    segment: int
    """Index of the parameter's segment."""
    start: int
    numel: int


HALVES: Final = (torch.bfloat16, torch.float16)
"""Data types that have too few digits for sums and small updates."""


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of reals, in one more dimension and in the same memory.

    Nothing that is reduced, stepped, hashed or sent is complex.

    Args:
        tensor: Any tensor.

    Returns:
        A view; the tensor itself if it is not complex.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def state_type(dtype: torch.dtype) -> torch.dtype:
    """Return the data type of sums, stepped weights and optimizer state for such a parameter."""
    return torch.float32 if dtype in HALVES else dtype


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment; `numel` includes the gaps between parameters and the last cells."""

    dtype: torch.dtype
    """Data type of the parameters and their gradients."""
    device: torch.device
    numel: int

    @property
    def nbytes(self) -> int:
        """Size of the segment's sum, in bytes."""
        return self.numel * state_type(self.dtype).itemsize


class _OpenSegment:
    """A segment that still takes parameters."""

    def __init__(self, index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.index, self.dtype, self.device = index, dtype, device
        self.end = 0
        """Number of elements up to the end of the last parameter."""

    @property
    def step(self) -> int:
        return ALIGNMENT_BYTES // self.dtype.itemsize

    @property
    def start(self) -> int:
        """Start of the next parameter, in elements."""
        return -(-self.end // self.step) * self.step

    def is_full_for(self, numel: int, segment_bytes: int | None) -> bool:
        if segment_bytes is None:
            segment_bytes = SEGMENT_BYTES_ON_CPU if self.device.type == "cpu" else SEGMENT_BYTES
        itemsize = state_type(self.dtype).itemsize
        if self.index == 0:
            return self.end * itemsize >= min(FIRST_BYTES, segment_bytes)
        return self.end > 0 and (self.start + numel) * itemsize > segment_bytes

    def closed(self) -> Segment:
        return Segment(self.dtype, self.device, self.start + self.step)


class FlatLayout:
    """Places for named parameters; `slots` are in the order of the parameters."""

    def __init__(
        self, parameters: Iterable[tuple[str, torch.Tensor]], segment_bytes: int | None = None
    ) -> None:
        """Lay the parameters out.

        Args:
            parameters: Names and tensors, in the model's order.
            segment_bytes: Upper bound on a segment, in bytes; None for the default of the device.
        """
        all_segments: list[_OpenSegment] = []
        last: dict[tuple[torch.dtype, torch.device], _OpenSegment] = {}
        slots = []
        for name, parameter in reversed(list(parameters)):
            key = parameter.dtype, parameter.device
            segment = last.get(key)
            if segment is None or segment.is_full_for(parameter.numel(), segment_bytes):
                segment = last[key] = _OpenSegment(len(all_segments), *key)
                all_segments.append(segment)
            start = segment.start
            segment.end = start + parameter.numel()
            slots.append(
                ParameterSpan(name, parameter.shape, segment.index, start, parameter.numel())
            )
        self.slots = tuple(reversed(slots))
        self.segments = tuple(segment.closed() for segment in all_segments)

    @property
    def nbytes(self) -> int:
        """Size of one set of `zeros`, a "parameter-size buffer", in bytes."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest segment's sum, in bytes."""
        return max(segment.nbytes for segment in self.segments)

    @property
    def numel(self) -> int:
        """Number of elements of the parameters, without gaps."""
        return sum(slot.numel for slot in self.slots)

    def zeros(self, make: Zeros = plain_zeros) -> list[torch.Tensor]:
        """Return a new set of flat tensors for sums or weights, one per segment."""
        return [make(s.numel, state_type(s.dtype), s.device) for s in self.segments]

    def gradient_zeros(self) -> list[torch.Tensor]:
        """Return a new set of flat tensors for gradients, one per segment."""
        return [plain_zeros(s.numel, s.dtype, s.device) for s in self.segments]

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of a set of flat tensors with the parameters' shapes, in their order."""
        return [
            flats[s.segment].narrow(0, s.start, s.numel).view(s.shape)  # a view: nothing is copied
            for s in self.slots
        ]

    def model_fingerprint(self) -> str:
        """Return a text that is equal if names, shapes and types of the parameters are."""
        return self._digest(lambda _: "")

    def fingerprint(self) -> str:
        """Return a text that is equal on two ranks if the places are equal, too (R27)."""
        return self._digest(lambda slot: f"{slot.segment}@{slot.start}")

    def _digest(self, more: Callable[[ParameterSpan], str]) -> str:
        digest = blake2b(digest_size=16)
        for slot in self.slots:
            dtype = self.segments[slot.segment].dtype
            digest.update(f"{slot.name}:{tuple(slot.shape)}:{dtype}{more(slot)};".encode())
        return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor.

    Args:
        tensor: Any strided tensor.

    Returns:
        The bytes. Those of a contiguous tensor on a CPU are its own memory and not a copy, so use
        them before the tensor changes.
    """
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().data


def fill_from_bytes(tensor: torch.Tensor, data: bytes | bytearray | memoryview) -> None:
    """Fill a tensor from bytes, as the inverse of `bytes_of`.

    Args:
        tensor: A contiguous tensor.
        data: The bytes. If they are the tensor's own memory, nothing is copied.

    Raises:
        ValueError: The number of bytes is not that of the tensor.
    """
    assert tensor.is_contiguous()
    host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
    source = memoryview(data).cast("B")
    target = bytes_of(host)
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes for a tensor of {target.nbytes}")
    into, values = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if into.ctypes.data != values.ctypes.data:
        np.copyto(into, values)  # without the GIL
    if host is not tensor:
        tensor.copy_(host)
