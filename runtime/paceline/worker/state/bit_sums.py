"""A hash of weights that a device computes by itself, with the same result on a host (I5, R23).

The bytes are read as 64-bit words. Each block of BLOCK_WORDS words is multiplied with odd factors
that look random and summed, modulo 2^64: integers, so the order of additions does not matter. A
single word that differs always changes its sum, since an odd factor is invertible; other
differences cancel out with a chance of about 2^-64. What leaves the device is one sum per block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from typing import Final

import numpy as np
import torch

from paceline.worker.state.flat import bytes_of

WORD_BYTES: Final = 8
BLOCK_WORDS: Final = 1 << 17
BLOCKS_AT_ONCE: Final = 32
"""On a device, whose products take memory of their own meanwhile: 32 MiB."""
HASH_BYTES: Final = 4


def hash_of_model(weights: Sequence[torch.Tensor], frozen: Sequence[int]) -> int:
    """Return 32 bits: of the weights that are trained, and of the hash of each that is not."""
    digest = blake2b(array("I", frozen).tobytes(), digest_size=HASH_BYTES)
    _update(digest, weights)
    return int.from_bytes(digest.digest(), "little")


def hash_of(flats: Sequence[torch.Tensor]) -> int:
    """Return 32 bits, of weights in the order of their memory."""
    digest = blake2b(digest_size=HASH_BYTES)
    _update(digest, flats)
    return int.from_bytes(digest.digest(), "little")


def _update(digest: blake2b, flats: Sequence[torch.Tensor]) -> None:
    # All sums of a device are queued before the first one is waited for.
    sums = [torch.cat(list(_sums(flat))) for flat in flats]
    for flat, each in zip(flats, sums, strict=True):
        digest.update(flat.nbytes.to_bytes(WORD_BYTES, "little"))
        digest.update(bytes_of(each))


def _sums(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    words, factors = _words(flat), _factors(flat.device)
    whole = len(words) // BLOCK_WORDS * BLOCK_WORDS
    # A host's cache holds the product of one block.
    at_once = 1 if flat.device.type == "cpu" else BLOCKS_AT_ONCE
    for blocks in words[:whole].view(-1, BLOCK_WORDS).split(at_once):
        yield (blocks * factors).sum(1)
    rest = words[whole:]
    yield (rest * factors[: len(rest)]).sum(0, keepdim=True)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the bytes as integers of 64 bits, with zeros behind the last ones."""
    raw = flat.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.nbytes % WORD_BYTES == 0 and raw.storage_offset() % WORD_BYTES == 0:
        return raw.view(torch.int64)
    padded = raw.new_zeros(-(-raw.nbytes // WORD_BYTES) * WORD_BYTES)
    padded[: raw.nbytes] = raw
    return padded.view(torch.int64)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the odd numbers, the same everywhere: numpy keeps this generator's raw stream."""
    drawn = np.random.PCG64(0).random_raw(BLOCK_WORDS) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64)).to(device)
