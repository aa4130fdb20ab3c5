"""Random data whose sum depends on the order of additions, and a digest of the bits of a sum."""

from __future__ import annotations

from typing import Final

import torch

from paceline.core.collectives.same_bits import PROBE_BYTES

EXPONENTS: Final = 12
"""Exponent range: the data span 2 ** -12 to 2 ** 12, so nearly every addition rounds."""


def make_probes(rank: int, device: torch.device) -> list[torch.Tensor]:
    """Return one float32 buffer of random data per probe size, different on each rank.

    Args:
        rank: Index of this rank, which seeds the data.
        device: Where the buffers lie.

    Returns:
        Flat tensors. Their contents are in memory when the call returns.
    """
    generator = torch.Generator().manual_seed(rank)
    probes = []
    for size in PROBE_BYTES:
        numel = size // torch.float32.itemsize
        exponents = torch.randint(-EXPONENTS, EXPONENTS + 1, (numel,), generator=generator)
        probes.append(torch.randn(numel, generator=generator).ldexp(exponents).to(device))
    return probes


def digest(buffer: torch.Tensor) -> int:
    """Return a digest of the bits of a float32 buffer, modulo 2 ** 64.

    One changed element always changes the digest: each has an odd weight, which differs from place
    to place.

    Args:
        buffer: Flat float32 tensor.

    Returns:
        A signed 64-bit integer.
    """
    bits = buffer.view(torch.int32).long()
    weights = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int((bits * weights).sum().item())
