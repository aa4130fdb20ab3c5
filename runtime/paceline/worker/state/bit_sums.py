"""A hash of weights that a device computes by itself, with the same result as a host (I5, R23).

The bytes are read as 64-bit words. Each block of BLOCK_WORDS words is multiplied by odd
pseudo-random factors and summed, modulo 2^64. These are integers, so the order of additions does
not matter. A single word that differs always changes its sum, since an odd factor is invertible.
Other differences cancel out with a probability of about 2^-64. Only one sum per block leaves the
device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch

from paceline.worker.state.flat import bytes_of

WORD_BYTES: Final = 8
BLOCK_WORDS: Final = 1 << 17
"""Number of words that one sum covers."""
BLOCKS_AT_ONCE: Final = 32
"""Number of blocks that a device multiplies at once; the products take 32 MiB meanwhile."""
HASH_BYTES: Final = 4
"""Size of a hash, in bytes."""


def hash_of_model(weights: Sequence[torch.Tensor], frozen: Sequence[int]) -> int:
    """Return a hash of a model.

    Args:
        weights: Flat tensors of the trained weights.
        frozen: Hash of each tensor that is not trained.

    Returns:
        A number of 32 bits.
    """
    digest = blake2b(array("I", frozen).tobytes(), digest_size=HASH_BYTES)
    _update(digest, weights)
    return int.from_bytes(digest.digest(), "little")


def hash_of(flats: Sequence[torch.Tensor]) -> int:
    """Return a hash of 32 bits of flat tensors, in the order of their memory."""
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
    if flat.device.type == "cpu":
        yield _sums_on_host(words.numpy(), factors.numpy())
        return
    whole = len(words) // BLOCK_WORDS * BLOCK_WORDS
    for blocks in words[:whole].view(-1, BLOCK_WORDS).split(BLOCKS_AT_ONCE):
        yield (blocks * factors).sum(1)
    rest = words[whole:]
    yield (rest * factors[: len(rest)]).sum(0, keepdim=True)


def _sums_on_host(words: np.ndarray[Any, Any], factors: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the sums of all blocks, in one pass over the words and without products in memory."""
    starts = range(0, len(words) + 1, BLOCK_WORDS)
    blocks = [words[start : start + BLOCK_WORDS] for start in starts]
    return torch.tensor([int(np.dot(each, factors[: len(each)])) for each in blocks])


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as 64-bit integers, padded with zeros at the end."""
    raw = flat.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.nbytes % WORD_BYTES == 0 and raw.storage_offset() % WORD_BYTES == 0:
        return raw.view(torch.int64)
    padded = raw.new_zeros(-(-raw.nbytes // WORD_BYTES) * WORD_BYTES)
    padded[: raw.nbytes] = raw
    return padded.view(torch.int64)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the factors, the same everywhere: numpy keeps this generator's raw stream."""
    drawn = np.random.PCG64(0).random_raw(BLOCK_WORDS) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64)).to(device)
