"""Random data whose sum depends on the order of additions, and the bits of a sum as one integer."""

from __future__ import annotations

from typing import Final

import torch

from paceline.core.collectives.same_bits import PROBE_BYTES

EXPONENTS: Final = 12
"""The data span 2 ** -12 to 2 ** 12: nearly each addition rounds."""


def make_probes(rank: int, device: torch.device) -> list[torch.Tensor]:
    """One buffer of float32 per size, other data on each rank; in memory on return."""
    generator = torch.Generator().manual_seed(rank)
    probes = []
    for size in PROBE_BYTES:
        numel = size // torch.float32.itemsize
        exponents = torch.randint(-EXPONENTS, EXPONENTS + 1, (numel,), generator=generator)
        probes.append(torch.randn(numel, generator=generator).ldexp(exponents).to(device))
    return probes


def digest(buffer: torch.Tensor) -> int:
    """Of the bits of a float32 buffer, modulo 2 ** 64. One changed element always changes it: each
    has an odd weight, which differs from place to place."""
    bits = buffer.view(torch.int32).long()
    weights = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int((bits * weights).sum().item())
