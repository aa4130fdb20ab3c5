"""Collectives of a script, written as sums of flat floating-point buffers.

A sum is all that the data channel has, and it has the same bits on every rank. A *gather* sums
buffers of the size of the result, in which each rank fills its own part and leaves the others zero.
Tensors travel in it as numbers of 16 bits, which float32 holds exactly, whatever their type is. So
a gather returns the bits that were sent. Maxima, products and sums of integers are computed from a
gather, in rank order, on every rank.

The first elements of a gather say who has taken part: 1 for each slot that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Final

import torch

WORD_BYTES: Final = 2
"""Bytes that one float32 of a gather carries."""
SUMMED: Final = (torch.float32, torch.float64)
"""Types that are summed as they are."""
HALVES: Final = (torch.float16, torch.bfloat16)
"""Types that are summed in float32 and rounded once."""

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COMBINES: Final[dict[str, Combine]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""How two tensors become one, by the name of torch's `ReduceOp`."""


def words_of(numel: int, dtype: torch.dtype) -> int:
    """Return how many float32 elements carry `numel` elements of a type."""
    return -(-numel * dtype.itemsize // WORD_BYTES)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors as float32 numbers, one tensor after the other."""
    parts = []
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        data = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
        if data.numel() % WORD_BYTES:
            data = torch.cat([data, data.new_zeros(1)])
        parts.append(data.view(torch.int16).to(torch.float32))
    return torch.cat(parts) if parts else torch.zeros(0)


def unpack(words: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors with the bytes that `pack` has made numbers of.

    Args:
        words: The numbers.
        likes: Tensors of the shapes and types that were packed.

    Returns:
        New tensors.
    """
    tensors, at = [], 0
    for like in likes:
        size = words_of(like.numel(), like.dtype)
        data = words[at : at + size].to(torch.int16).view(torch.uint8)
        data = data[: like.numel() * like.dtype.itemsize].clone()
        tensors.append(data.view(like.dtype).reshape(like.shape))
        at += size
    return tensors


def gather_buffer(
    tensors: Sequence[torch.Tensor] | None, slot: int, slots: int, likes: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the buffer that a rank contributes to a gather.

    Args:
        tensors: What this rank contributes; None if it contributes nothing.
        slot: The slot of this rank.
        slots: Number of slots.
        likes: Tensors of the shapes and types that each rank contributes.

    Returns:
        A float32 tensor: `slots` flags, then a part for each slot.
    """
    size = sum(words_of(like.numel(), like.dtype) for like in likes)
    buffer = torch.zeros(slots + slots * size, dtype=torch.float32, device=likes[0].device)
    buffer[slot] = 1
    if tensors is not None and size:
        buffer[slots + slot * size : slots + (slot + 1) * size] = pack(tensors)
    return buffer


def gathered(
    buffer: torch.Tensor, slots: int, likes: Sequence[torch.Tensor]
) -> list[list[torch.Tensor] | None]:
    """Return what each slot contributed to a gather; None for a slot that was not there."""
    here = buffer[:slots].tolist()
    size = (buffer.numel() - slots) // slots
    parts = (buffer[slots + slot * size : slots + (slot + 1) * size] for slot in range(slots))
    return [unpack(part, likes) if flag else None for flag, part in zip(here, parts, strict=True)]


def combine(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce the tensors of several ranks to one, in rank order.

    Args:
        name: Name of the reduction, a key of `COMBINES`.
        tensors: The tensors, at least one.

    Returns:
        A new tensor.
    """
    total = reduce(COMBINES[name], tensors[1:], tensors[0].clone())
    if name == "AVG":
        total = total / len(tensors) if total.is_floating_point() else total // len(tensors)
    return total
