"""Gradient buckets against an oracle of separate tensors, and what user code does to `p.grad`."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.core.protocol.pending import Place
from paceline.worker.state.gradients import GradientBuckets

SHAPES = [(3, 5), (), (0,), (7,), (2, 3, 4)]


def make_buckets(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> GradientBuckets:
    named = [
        (f"{dtype}.{index}", torch.nn.Parameter(torch.ones(shape, dtype=dtype)))
        for dtype in dtypes
        for index, shape in enumerate(SHAPES)
    ]
    return GradientBuckets(named)


def add_gradient(buckets: GradientBuckets, value: float) -> None:
    """A backward pass that adds value x (index + 1) to each element of parameter `index`."""
    for index, parameter in enumerate(buckets.parameters):
        (parameter.sum() * value * (index + 1)).backward()


def held(buckets: GradientBuckets) -> list[torch.Tensor]:
    return buckets.layout.views(buckets.load_result(Place.HELD))


def all_equal(tensors: list[torch.Tensor], value: float) -> bool:
    return all(
        torch.equal(tensor, torch.full_like(tensor, value * (index + 1)))
        for index, tensor in enumerate(tensors)
    )


def grads(buckets: GradientBuckets) -> list[torch.Tensor]:
    return [p.grad for p in buckets.parameters if p.grad is not None]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), st.integers(-8, 8)),
        st.tuples(st.just("announce"), st.sampled_from([1, 2, 0.5])),
        st.tuples(st.just("commit"), st.just(0)),
        st.tuples(st.just("zero_grad"), st.just(0)),
        st.tuples(st.just("scale"), st.sampled_from([1, 2, 0.25])),
    ),
    max_size=25,
)


@given(operations=operations)
@settings(max_examples=60, deadline=None)
def test_the_two_places_hold_what_separate_numbers_would(
    operations: list[tuple[str, float]],
) -> None:
    """Powers of two and small integers, so that the oracle is exact."""
    buckets, grad, waiting = make_buckets(), 0.0, 0.0
    for operation, value in operations:
        match operation:
            case "backward":
                add_gradient(buckets, value)
                buckets.attach()
                grad += value
            case "announce":
                if buckets.held:
                    buckets.merge(1.0, value)
                    waiting += grad * value
                else:
                    buckets.swap()
                    waiting = grad
                grad = 0.0
            case "commit":
                buckets.zero(Place.HELD)
                waiting = 0.0
            case "zero_grad":
                for parameter in buckets.parameters:
                    parameter.grad = None  # model.zero_grad()
                buckets.attach()
            case "scale":
                buckets.scale(Place.GRAD, value)
                grad *= value
        assert all_equal(grads(buckets), grad)
        assert all_equal(held(buckets), waiting)


def test_a_gradient_made_outside_is_copied_in_and_counted() -> None:
    buckets = make_buckets()
    add_gradient(buckets, 1.0)
    for parameter in buckets.parameters:
        parameter.grad = None
    add_gradient(buckets, 2.0)
    assert buckets.touched()
    assert buckets.attach() == len(SHAPES)
    assert buckets.copied_in == len(SHAPES)
    assert all_equal(grads(buckets), 3.0)
    assert buckets.attach() == 0


def test_backward_passes_are_noticed() -> None:
    buckets = make_buckets()
    assert not buckets.touched()
    add_gradient(buckets, 1.0)
    assert buckets.touched()
    buckets.swap()
    assert not buckets.touched()
    add_gradient(buckets, 1.0)
    buckets.merge(1.0, 1.0)
    assert not buckets.touched()
    assert not buckets.detached()
    for parameter in buckets.parameters:
        parameter.grad = None
    assert buckets.detached()


def test_each_data_type_has_a_flat_tensor() -> None:
    buckets = make_buckets((torch.float32, torch.bfloat16))
    add_gradient(buckets, 1.0)
    assert [flat.dtype for flat in buckets.result] == [torch.float32, torch.bfloat16]
    assert buckets.layout.numel == 2 * sum(torch.Size(shape).numel() for shape in SHAPES)
    assert {parameter.grad.dtype for parameter in buckets.parameters} == {  # type: ignore[union-attr]
        torch.float32,
        torch.bfloat16,
    }


def test_the_result_of_an_abandoned_reduction_is_left_alone() -> None:
    buckets = make_buckets()
    add_gradient(buckets, 4.0)
    buckets.swap()
    old = buckets.load_result(Place.HELD, 0.5)
    assert all_equal(buckets.layout.views(old), 2.0)
    buckets.renew_result()
    new = buckets.load_result(None)
    old[0].fill_(9.0)
    assert not any(flat.any() for flat in new)
    assert all_equal(held(buckets), 4.0)


def test_finite_is_exact() -> None:
    """Sums that overflow are no reason to drop a gradient; a NaN or an Inf always is."""
    buckets = make_buckets()
    for value, want in ((3e38, True), (-3e38, True), (float("nan"), False), (float("inf"), False)):
        buckets.zero(Place.GRAD)
        grads(buckets)[0].fill_(value)
        assert buckets.finite(Place.GRAD) is want
        assert buckets.finite(Place.HELD)
    both = grads(buckets)[0].view(-1)
    both[0], both[1] = float("inf"), float("-inf")
    assert not buckets.finite(Place.GRAD)


def test_the_fingerprint_tells_models_apart() -> None:
    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        return GradientBuckets(
            [(name, torch.nn.Parameter(torch.ones(shape, dtype=dtype)))]
        ).fingerprint()

    base = of("w", (2, 3), torch.float32)
    assert base == of("w", (2, 3), torch.float32)
    assert len({base, of("v", (2, 3), torch.float32), of("w", (3, 2), torch.float32)}) == 3
    assert base != of("w", (2, 3), torch.float64)
