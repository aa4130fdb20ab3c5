"""Tensors travel in sums of float32 with all their bits, and reductions follow the rank order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paceline.train.script.encode import (
    COMBINES,
    combine,
    gather_buffer,
    gathered,
    pack,
    unpack,
    words_of,
)

from testing.simulation.histories import bounded

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (3, 0, 2), (1, 1, 5)]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor with any bits: NaNs, infinities, denormal numbers and extreme integers."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert bits(one) == bits(other)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_keeps_its_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape, seed=len(shape))
    words = pack([tensor])
    assert words.dtype is torch.float32
    assert words.numel() == words_of(tensor.numel(), dtype)
    [result] = unpack(words, [torch.empty(shape, dtype=dtype)])
    assert_equal(result, tensor)


tensors = st.builds(
    random_bits, st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 2**31)
)


@bounded(100)
@given(st.lists(tensors, max_size=5))
def test_several_tensors_keep_their_bits(sent: list[torch.Tensor]) -> None:
    result = unpack(pack(sent), [torch.empty_like(tensor) for tensor in sent])
    for one, other in zip(sent, result, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.ones(3).expand(2, 3),
        torch.arange(8).reshape(2, 2, 2).transpose(0, 2),
        torch.ones(2, requires_grad=True),
    ],
    ids=["transposed", "strided", "expanded", "permuted", "with a gradient"],
)
def test_a_view_keeps_its_values(tensor: torch.Tensor) -> None:
    [result] = unpack(pack([tensor]), [tensor])
    assert_equal(result, tensor.detach())


COMPLEX = torch.tensor([1 + 2j, 3 - 4j])


@pytest.mark.parametrize("view", [COMPLEX.conj(), COMPLEX.conj().imag], ids=["conj", "imag"])
def test_a_lazily_conjugated_or_negated_view_keeps_its_values(view: torch.Tensor) -> None:
    [result] = unpack(pack([view]), [view])
    assert_equal(result, view)


@bounded(60)
@given(
    st.integers(1, 5),
    st.sets(st.integers(0, 4)),
    st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=3),
)
def test_a_sum_of_gather_buffers_returns_what_each_slot_sent(
    slots: int, absent: set[int], kinds: list[tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    likes = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
    sent = {
        slot: [random_bits(dtype, shape, seed=slot) for dtype, shape in kinds]
        for slot in range(slots)
        if slot not in absent
    }
    buffers = [gather_buffer(own, slot, slots, likes) for slot, own in sent.items()]
    total = sum(buffers, torch.zeros_like(gather_buffer(None, 0, slots, likes)))
    parts = gathered(total, slots, likes)
    assert [part is not None for part in parts] == [slot in sent for slot in range(slots)]
    for slot, own in sent.items():
        part = parts[slot]
        assert part is not None
        for one, other in zip(own, part, strict=True):
            assert_equal(one, other)


def test_a_rank_that_contributes_nothing_still_counts_as_present() -> None:
    likes = [torch.empty(2)]
    total = gather_buffer(None, 0, 2, likes) + gather_buffer([torch.ones(2)], 1, 2, likes)
    first, second = gathered(total, 2, likes)
    assert first is not None
    assert second is not None
    assert first[0].tolist() == [0, 0]
    assert second[0].tolist() == [1, 1]


# ---- reductions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("SUM", [9, 12]), ("PRODUCT", [15, 60]), ("MIN", [1, 3]), ("MAX", [5, 5])),
        *(("BAND", [1, 0]), ("BOR", [7, 7]), ("BXOR", [7, 2]), ("AVG", [3, 4])),
    ],
)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_reduced_exactly(name: str, expected: list[int], dtype: torch.dtype) -> None:
    ranks = [torch.tensor(values, dtype=dtype) for values in ([1, 3], [3, 4], [5, 5])]
    before = [tensor.clone() for tensor in ranks]
    total = combine(name, ranks)
    assert total.dtype is dtype
    assert total.tolist() == expected
    assert all(torch.equal(one, other) for one, other in zip(before, ranks, strict=True))


def test_a_sum_of_large_integers_is_exact() -> None:
    ranks = [torch.tensor([2**53 + 1]), torch.tensor([2**53 + 2])]
    assert combine("SUM", ranks).tolist() == [2**54 + 3]


def test_an_average_of_floats_is_divided_once() -> None:
    ranks = [torch.tensor([value]) for value in (0.1, 0.2, 0.4)]
    assert torch.equal(combine("AVG", ranks), (ranks[0] + ranks[1] + ranks[2]) / 3)


@pytest.mark.parametrize("name", ["MIN", "MAX", "SUM", "PRODUCT"])
def test_a_nan_on_one_rank_reaches_the_result(name: str) -> None:
    assert combine(name, [torch.tensor([1.0]), torch.tensor([math.nan])]).isnan().all()


@pytest.mark.parametrize("name", COMBINES)
def test_one_rank_alone_gets_its_own_values_in_new_memory(name: str) -> None:
    own = torch.tensor([3, 4])
    total = combine(name, [own])
    assert total.tolist() == [3, 4]
    assert total.data_ptr() != own.data_ptr()


@pytest.mark.parametrize(("name", "expected"), [("MAX", True), ("MIN", False)])
def test_flags_are_reduced_as_numbers_of_0_and_1(name: str, *, expected: bool) -> None:
    assert combine(name, [torch.tensor([True]), torch.tensor([False])]).item() is expected
