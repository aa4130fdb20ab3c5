"""Parameters laid out in flat memory: one flat tensor per data type and device.

Gradients, results and committed weights share one `FlatLayout`, so that an update is arithmetic
between equal flat tensors, a reduction moves a few large tensors instead of many small ones, and
the bytes of a state are the same on every rank. This file knows where a parameter lies; it owns no
tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import torch

ALIGNMENT_BYTES: Final = 64
"""Each parameter starts on a cache line; what lies between two is zero and stays zero."""


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    """Where one parameter lies."""

    name: str
    shape: torch.Size
    flat: int
    """Index of the flat tensor."""
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatKind:
    """What a flat tensor is made of; `numel` includes the gaps between parameters."""

    dtype: torch.dtype
    device: torch.device
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class FlatLayout:
    """Places for named parameters, in their order."""

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        ends: dict[tuple[torch.dtype, torch.device], int] = {}
        slots = []
        for name, parameter in parameters:
            key = parameter.dtype, parameter.device
            step = ALIGNMENT_BYTES // parameter.dtype.itemsize
            start = -(-ends.get(key, 0) // step) * step
            ends[key] = start + parameter.numel()
            flat = list(ends).index(key)
            slots.append(ParameterSpan(name, parameter.shape, flat, start, parameter.numel()))
        self.slots = tuple(slots)
        self.kinds = tuple(FlatKind(*key, numel) for key, numel in ends.items())

    @property
    def nbytes(self) -> int:
        """Bytes of one set of flat tensors: a "parameter-size buffer"."""
        return sum(kind.nbytes for kind in self.kinds)

    @property
    def numel(self) -> int:
        """Elements of the parameters, without gaps."""
        return sum(slot.numel for slot in self.slots)

    def zeros(self) -> list[torch.Tensor]:
        """A new set of flat tensors."""
        return [torch.zeros(k.numel, dtype=k.dtype, device=k.device) for k in self.kinds]

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters' shapes on that memory, in the order of the slots."""
        return [
            flats[s.flat].narrow(0, s.start, s.numel).view(s.shape)  # a view: nothing is copied
            for s in self.slots
        ]

    def fingerprint(self) -> str:
        """Equal on two ranks if names, shapes and types are."""
        digest = blake2b(digest_size=16)
        for slot in self.slots:
            kind = self.kinds[slot.flat]
            digest.update(f"{slot.name}:{tuple(slot.shape)}:{kind.dtype};".encode())
        return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; on a CPU its own memory, not a copy, so use it before it changes."""
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().data


def fill_from_bytes(tensor: torch.Tensor, data: bytes | bytearray | memoryview) -> None:
    """Inverse of `bytes_of`, bit by bit. ValueError if the size differs."""
    assert tensor.is_contiguous()
    host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
    source = memoryview(data).cast("B")
    target = bytes_of(host)
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes for a tensor of {target.nbytes}")
    target[:] = source
    if host is not tensor:
        tensor.copy_(host)
