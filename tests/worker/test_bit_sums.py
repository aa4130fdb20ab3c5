"""The hash by which ranks compare weights: sums over blocks, which a device can compute itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paceline.worker.state import bit_sums
from paceline.worker.state.bit_sums import BLOCK_WORDS, hash_of, hash_of_model


def plain(flat: torch.Tensor) -> list[int]:
    """Compute the sums with Python's integers."""
    data = flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    factors = [value % 2**64 for value in bit_sums._factors(torch.device("cpu")).tolist()]
    blocks = [words[i : i + BLOCK_WORDS] for i in range(0, len(words), BLOCK_WORDS)]
    if not words or len(words) % BLOCK_WORDS == 0:
        blocks.append([])
    return [sum(w * f for w, f in zip(block, factors, strict=False)) % 2**64 for block in blocks]


@pytest.mark.parametrize("words", [0, 1, 5, BLOCK_WORDS, BLOCK_WORDS + 3])
@pytest.mark.parametrize("at_once", [1, 2, 32])
def test_the_sums_are_those_of_exact_integers(
    words: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = torch.randn(2 * words, generator=torch.Generator().manual_seed(words))
    monkeypatch.setattr(bit_sums, "BLOCKS_AT_ONCE", at_once)
    sums = torch.cat(list(bit_sums._sums(flat))).tolist()
    assert [value % 2**64 for value in sums] == plain(flat)


def test_blocks_are_summed_alike_one_by_one_and_together() -> None:
    flat = torch.randn(2 * 5 * BLOCK_WORDS + 6, generator=torch.Generator().manual_seed(1))
    words = bit_sums._words(flat)
    together = (words[: 5 * BLOCK_WORDS].view(5, -1) * bit_sums._factors(flat.device)).sum(1)
    assert torch.cat(list(bit_sums._sums(flat)))[:5].equal(together)


@given(st.integers(0, 2**31), st.integers(0, 40), st.integers(0, 31))
def test_any_flipped_bit_changes_the_hash(seed: int, at: int, bit: int) -> None:
    flat = torch.randn(41, generator=torch.Generator().manual_seed(seed % 1000))
    other = flat.clone()
    other.view(torch.int32)[at] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert hash_of([flat]) != hash_of([other])


def test_swapped_values_change_the_hash() -> None:
    flat = torch.arange(4 * BLOCK_WORDS, dtype=torch.float32)
    swapped = flat.clone()
    swapped[[3, 9]] = flat[[9, 3]]
    blocks = torch.cat([flat[2 * BLOCK_WORDS :], flat[: 2 * BLOCK_WORDS]])
    assert len({hash_of([each]) for each in (flat, swapped, blocks)}) == 3


def test_small_differences_of_opposite_signs_do_not_cancel_out() -> None:
    """Move one weight up by one unit in the last place and the next one down, as rounding does."""
    flat = torch.ones(64)
    hashes = {hash_of([flat])}
    for at in range(0, 64, 2):
        other = flat.clone().view(torch.int32)
        other[at] += 1
        other[(at + 2) % 64] -= 1
        hashes.add(hash_of([other.view(torch.float32)]))
    assert len(hashes) == 33


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool])
def test_memory_of_any_length_and_alignment_is_hashed(dtype: torch.dtype) -> None:
    base = torch.ones(40, dtype=dtype)
    for start in range(5):
        for length in range(6):
            part = base[start : start + length]
            assert hash_of([part]) == hash_of([part.clone()])
    assert len({hash_of([base[:n]]) for n in range(40)}) == 40


def test_padding_zeros_do_not_count_as_weights() -> None:
    assert hash_of([torch.zeros(1)]) != hash_of([torch.zeros(2)])
    assert hash_of([torch.zeros(2)]) != hash_of([torch.zeros(1), torch.zeros(1)])


def test_the_hash_of_a_model_covers_frozen_weights() -> None:
    weights = [torch.ones(3)]
    assert hash_of_model(weights, [1]) != hash_of_model(weights, [2])
    assert hash_of_model(weights, []) == hash_of(weights)
