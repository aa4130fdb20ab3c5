"""Copies of large tensors have the bits of torch, whatever their size and place in memory."""

from __future__ import annotations

import pytest
import torch
from paceline.transport.native import copies

LARGE = copies.LARGE_BYTES // 4
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 1e-38, 3.4e38)


def numbers(count: int) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)
    values[-len(SPECIAL) :] = torch.tensor(SPECIAL)
    return values


@pytest.mark.parametrize("count", [LARGE - 1, LARGE, LARGE + 1, LARGE + 15, LARGE + 17])
@pytest.mark.parametrize("offset", [0, 1, 3, 15])
def test_a_copy_has_the_bits_of_torch_and_ends_where_it_should(count: int, offset: int) -> None:
    assert copies.library() is not None
    source = numbers(count + offset)[offset:]
    for factor in (1 / 3, 0.5, 1.0):
        whole = torch.full((count + offset + 1,), 7.0)
        copies.scale(source, whole[offset:-1], factor)
        want = torch.mul(source, factor)
        assert torch.equal(whole[offset:-1].view(torch.int32), want.view(torch.int32))
        assert whole[-1] == 7.0
        assert (whole[:offset] == 7.0).all()
    whole = torch.full((count + offset + 1,), 7.0)
    copies.copy(source, whole[offset:-1])
    assert torch.equal(whole[offset:-1].view(torch.int32), source.view(torch.int32))
    assert whole[-1] == 7.0
    assert (whole[:offset] == 7.0).all()


def test_other_types_and_layouts_are_copied_by_torch() -> None:
    double = torch.randn(LARGE, dtype=torch.float64)
    result = torch.empty_like(double)
    copies.scale(double, result, 1 / 3)
    assert torch.equal(result, torch.mul(double, 1 / 3))
    copies.copy(double, result)
    assert torch.equal(result, double)
    strided = torch.randn(2 * LARGE)[::2]
    into = torch.empty(LARGE)
    copies.scale(strided, into, 1 / 3)
    assert torch.equal(into, torch.mul(strided, 1 / 3))
    copies.copy(strided, into)
    assert torch.equal(into, strided)


def test_without_a_compiler_torch_makes_the_copies(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    copies.library.cache_clear()
    try:
        assert copies.library() is None
        source, target = numbers(LARGE), torch.empty(LARGE)
        copies.scale(source, target, 1 / 3)
        assert torch.equal(target.view(torch.int32), torch.mul(source, 1 / 3).view(torch.int32))
    finally:
        copies.library.cache_clear()
