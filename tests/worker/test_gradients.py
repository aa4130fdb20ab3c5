"""Gradient buffers against an oracle of separate tensors, and what user code does to `p.grad`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.core.protocol.pending import BufferName, Zero
from paceline.errors import UnsupportedError
from paceline.worker.state.gradients import Gradients

from testing.examples import examples

SHAPES = [(3, 5), (), (0,), (7,), (2, 3, 4)]


def make_buckets(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Gradients:
    named = [
        (f"{dtype}.{index}", torch.nn.Parameter(torch.ones(shape, dtype=dtype)))
        for dtype in dtypes
        for index, shape in enumerate(SHAPES)
    ]
    return Gradients(named)


def add_gradient(gradients: Gradients, value: float) -> None:
    """Run a backward pass that adds value x (index + 1) to each element of parameter `index`."""
    for index, parameter in enumerate(gradients.parameters):
        (parameter.sum() * value * (index + 1)).backward()


def late(gradients: Gradients) -> list[torch.Tensor]:
    return gradients.layout.views(loaded(gradients, BufferName.LATE))


def loaded(
    gradients: Gradients, source: BufferName | None, factor: float = 1.0
) -> list[torch.Tensor]:
    gradients.load_results(source, factor)
    return gradients.result


def all_equal(tensors: list[torch.Tensor], value: float) -> bool:
    return all(
        torch.equal(tensor, torch.full_like(tensor, value * (index + 1)))
        for index, tensor in enumerate(tensors)
    )


def grads(gradients: Gradients) -> list[torch.Tensor]:
    return [p.grad for p in gradients.parameters if p.grad is not None]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), st.integers(-8, 8)),
        st.tuples(st.just("announce"), st.sampled_from([1, 2, 0.5])),
        st.tuples(st.sampled_from(["commit", "commit in place"]), st.just(0)),
        st.tuples(st.just("zero_grad"), st.just(0)),
        st.tuples(st.just("assign"), st.integers(-8, 8)),
        st.tuples(st.just("erase"), st.just(0)),
        st.tuples(st.just("lay by"), st.just(0)),
        st.tuples(st.just("scale"), st.sampled_from([1, 2, 0.25])),
    ),
    max_size=25,
)


@given(operations=operations)
@settings(max_examples=examples(60), deadline=None)
def test_the_two_buffers_match_an_oracle_of_separate_numbers(
    operations: list[tuple[str, float]],
) -> None:
    """Use powers of two and small integers, so that the oracle is exact."""
    gradients, grad, earlier, waiting = make_buckets(), 0.0, 0.0, 0.0
    for operation, value in operations:
        match operation:
            case "backward":
                add_gradient(gradients, value)
                gradients.attach()
                grad += value
            case "announce":
                if gradients.late_in_use:
                    gradients.merge(1.0, value)
                    waiting += (grad + earlier) * value
                else:
                    gradients.swap()
                    waiting = grad + earlier
                grad = earlier = 0.0
            case "commit" if gradients.late_in_use:
                gradients.carry_out(Zero(BufferName.LATE))
                waiting = 0.0
            case "commit in place":
                gradients.carry_out(Zero(BufferName.GRAD))
                grad = earlier = 0.0
            case "zero_grad":
                for parameter in gradients.parameters:
                    parameter.grad = None  # model.zero_grad()
                grad = 0.0 if gradients.touched() else grad
                gradients.attach()
            case "assign" if gradients.touched():
                for index, parameter in enumerate(gradients.parameters):
                    parameter.grad = torch.full_like(parameter, value * (index + 1))
                gradients.attach()
                grad = value
            case "erase":
                grad = 0.0 if gradients.touched() else grad
                gradients.erase()
            case "lay by":
                gradients.lay_by()
                grad, earlier = 0.0, earlier + grad
            case "scale":
                gradients.scale(BufferName.GRAD, value)
                grad *= value
                earlier *= value
        whole = gradients.layout.views(loaded(gradients, BufferName.GRAD))
        assert all_equal(whole, grad + earlier)
        assert all_equal(grads(gradients), grad)
        assert not gradients.late_in_use or all_equal(late(gradients), waiting)


def test_a_gradient_made_outside_is_copied_in_and_counted() -> None:
    gradients = make_buckets()
    add_gradient(gradients, 1.0)
    gradients.mark_untouched()
    for parameter in gradients.parameters:
        parameter.grad = None
    add_gradient(gradients, 2.0)
    assert gradients.touched()
    assert gradients.attach() == len(SHAPES)
    assert gradients.copied_in == len(SHAPES)
    assert all_equal(grads(gradients), 3.0)
    assert gradients.attach() == 0


ASSIGNED: dict[str, Callable[[Any], object]] = {
    "clone": lambda p: setattr(p, "grad", p.grad.clone()),
    "other layout": lambda p: setattr(p, "grad", p.grad.t().clone().t()),
    "sparse": lambda p: setattr(p, "grad", p.grad.to_sparse()),
    "data": lambda p: setattr(p.grad, "data", p.grad.clone()),
    "data in place": lambda p: p.grad.data.mul_(1.0),
    "twice": lambda p: setattr(p, "grad", p.grad * 2 / 2),
}


@pytest.mark.parametrize("how", ASSIGNED)
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_that_the_script_assigns_counts_once(
    how: str, earlier: bool, again: bool
) -> None:
    """Compare the contributed gradient; with `again`, another backward pass adds to it."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    gradients, want = Gradients([("weight", weight)]), 3.0
    if earlier:
        (weight.sum() * 8.0).backward()
        gradients.lay_by()
        want += 8.0
    (weight.sum() * 3.0).backward()
    ASSIGNED[how](weight)
    if again:
        (weight.sum() * 16.0).backward()
        want += 16.0
    gradients.attach()
    gradients.swap()
    assert torch.equal(late(gradients)[0], torch.full((2, 3), want))
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(2, 3))
    weight.sum().backward()
    assert torch.equal(loaded(gradients, BufferName.GRAD)[0][:6], torch.ones(6))


def test_a_gradient_of_none_counts_as_zero_and_keeps_earlier_batches() -> None:
    one, other = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    gradients = Gradients([("one", one), ("other", other)])
    (one.sum() + other.sum() * 2.0).backward()
    gradients.lay_by()
    (one.sum() + other.sum() * 2.0).backward()
    one.grad = None
    gradients.attach()
    made = gradients.layout.views(loaded(gradients, BufferName.GRAD))
    assert [float(view[0]) for view in made] == [1.0, 4.0]


# torch warns about it once per process, after the backward pass.
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("listens", [True, False])
def test_backward_with_create_graph_is_refused(listens: bool) -> None:
    """Call backward(create_graph=True).

    It would count what an earlier backward pass of the lease has left twice.
    """
    gradients, [a, b, c, d], reported = watched(*"abcd")
    gradients.watch(reported.append if listens else None)
    a.square().sum().backward()
    twice = (a * b * c * d).sum()

    def computes_and_steps() -> None:
        twice.backward(create_graph=True)
        gradients.attach()

    with pytest.raises(UnsupportedError, match=r"create_graph=True[^$]*hint: .*autograd\.grad"):
        computes_and_steps()
    for parameter in (a, b, c, d):
        parameter.grad = None  # otherwise each is in a cycle with its gradient
    made = torch.autograd.grad((a * b).square().sum(), (a, b), create_graph=True)
    torch.stack([g.square().sum() for g in made]).sum().backward()
    gradients.attach()


def test_backward_passes_are_detected() -> None:
    gradients = make_buckets()
    assert not gradients.touched()
    add_gradient(gradients, 1.0)
    assert gradients.touched()
    gradients.swap()
    assert not gradients.touched()
    add_gradient(gradients, 1.0)
    gradients.merge(1.0, 1.0)
    assert not gradients.touched()
    assert not gradients.detached()
    for parameter in gradients.parameters:
        parameter.grad = None
    assert gradients.detached()


def test_each_dtype_has_its_own_segment() -> None:
    gradients = make_buckets((torch.float32, torch.bfloat16))
    add_gradient(gradients, 1.0)
    assert [s.dtype for s in gradients.layout.segments] == [torch.bfloat16, torch.float32]
    assert gradients.layout.numel == 2 * sum(torch.Size(shape).numel() for shape in SHAPES)
    assert {p.grad.dtype for p in gradients.parameters if p.grad is not None} == {
        torch.float32,
        torch.bfloat16,
    }


def test_a_renewed_result_is_independent_of_an_abandoned_reduction() -> None:
    gradients = make_buckets()
    add_gradient(gradients, 4.0)
    gradients.swap()
    old = loaded(gradients, BufferName.LATE, 0.5)
    assert all_equal(gradients.layout.views(old), 2.0)
    gradients.renew_result()
    new = loaded(gradients, None)
    old[0].fill_(9.0)
    assert not any(flat.any() for flat in new)
    assert all_equal(late(gradients), 4.0)


def test_the_finite_check_is_exact() -> None:
    """Check that values near overflow are finite, while a NaN or an Inf never is."""
    gradients = make_buckets()
    for value, want in ((3e38, True), (-3e38, True), (float("nan"), False), (float("inf"), False)):
        gradients.zero(BufferName.GRAD)
        grads(gradients)[0].fill_(value)
        assert gradients.finite(BufferName.GRAD) is want
    both = grads(gradients)[0].view(-1)
    both[0], both[1] = float("inf"), float("-inf")
    assert not gradients.finite(BufferName.GRAD)


def test_the_fingerprint_depends_on_name_shape_and_dtype() -> None:
    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        return Gradients([(name, torch.nn.Parameter(torch.ones(shape, dtype=dtype)))]).fingerprint()

    base = of("w", (2, 3), torch.float32)
    assert base == of("w", (2, 3), torch.float32)
    assert len({base, of("v", (2, 3), torch.float32), of("w", (3, 2), torch.float32)}) == 3
    assert base != of("w", (2, 3), torch.float64)


# ---- which segments are complete -----------------------------------------------------------------


def watched(*names: str, cell: int = 16) -> tuple[Gradients, list[torch.nn.Parameter], list[int]]:
    """Make parameters in registration order, two per segment, and a list of reported segments."""
    named = [(name, torch.nn.Parameter(torch.ones(cell))) for name in names]
    gradients, reported = Gradients(named, segment_bytes=2 * cell * 4), list[int]()
    gradients.watch(reported.append)
    return gradients, [parameter for _, parameter in named], reported


def test_a_segment_is_reported_when_it_has_its_last_gradient() -> None:
    gradients, [a, b, c, d], reported = watched(*"abcd")
    assert [slot.segment for slot in gradients.layout.slots] == [1, 1, 0, 0]
    d.sum().backward()
    a.sum().backward()
    assert reported == []
    c.sum().backward()
    assert reported == [0]
    before = gradients.written(1)
    b.sum().backward()
    assert reported == [0, 1]
    assert gradients.written(1) > before
    assert a.grad is not None
    assert torch.equal(a.grad, torch.ones_like(a))


def test_a_segment_is_reported_once_however_often_it_is_written() -> None:
    gradients, parameters, reported = watched(*"abcd")
    for _ in range(3):
        torch.stack([p.sum() for p in parameters]).sum().backward()
    assert sorted(reported) == [0, 1]
    gradients.watch(reported.append)
    parameters[3].sum().backward()
    assert sorted(reported) == [0, 1]
    parameters[2].sum().backward()
    assert sorted(reported) == [0, 0, 1]


def test_a_segment_with_a_missing_gradient_is_not_reported() -> None:
    gradients, [a, b, c, _], reported = watched(*"abcd")
    (a.sum() + b.sum() + c.sum()).backward()
    assert reported == [1]
    gradients.watch(None)
    add_gradient(gradients, 1.0)
    assert reported == [1], "nobody listens any more"


def test_a_segment_with_a_frozen_parameter_is_not_reported() -> None:
    _, [a, b, c, d], reported = watched(*"abcd")
    d.requires_grad_(False)
    (a.sum() + b.sum() + c.sum() + d.sum()).backward()
    assert reported == [1]


def test_a_parameter_that_is_used_twice_completes_its_segment_once() -> None:
    _, [_, _, c, d], reported = watched(*"abcd")
    (2.0 * d.sum() + 3.0 * d.sum()).backward()
    assert reported == []
    c.sum().backward()
    assert reported == [0]
    assert d.grad is not None
    assert torch.equal(d.grad, torch.full_like(d, 5.0))


def test_gradients_set_to_none_are_in_the_segment_when_it_is_reported() -> None:
    sums = []
    gradients, parameters, _ = watched(*"abcd")

    def look(segment: int) -> None:
        flats = loaded(gradients, BufferName.GRAD)
        sums.append((segment, float(flats[segment].sum())))

    gradients.watch(look)
    for parameter in parameters:
        parameter.grad = None
    torch.stack([p.sum() for p in parameters]).sum().backward()
    assert sorted(sums) == [(0, 32.0), (1, 32.0)]
    assert gradients.attach() == 0


def test_an_error_in_backward_leaves_the_next_batch_intact() -> None:
    gradients, parameters, reported = watched(*"abcd")

    def fail(_: torch.Tensor) -> None:
        raise ValueError

    hook = parameters[2].register_hook(fail)
    for parameter in reversed(parameters):
        with contextlib.suppress(ValueError):
            parameter.sum().backward()
    assert reported == [1]
    hook.remove()
    gradients.zero(BufferName.GRAD)
    gradients.watch(reported.append)
    torch.stack([p.sum() for p in parameters]).sum().backward()
    assert sorted(reported) == [0, 1, 1]
    assert all_equal([gradients.result[0]], 0.0)


def test_segments_of_a_compiled_model_are_reported() -> None:
    """Stand in for the compiler, which would take a minute.

    What it makes is one autograd node with the gradients of all parameters.
    """
    gradients, parameters, reported = watched(*"abcd")

    class AllAtOnce(torch.autograd.Function):
        @staticmethod
        def forward(_: object, *given: torch.Tensor) -> torch.Tensor:
            return torch.stack(given).sum()

        @staticmethod
        def backward(_: object, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(grad.expand(16) for _ in range(4))

    AllAtOnce.apply(*parameters).backward()
    assert sorted(reported) == [0, 1]
    assert all(torch.equal(x, torch.ones(16)) for x in grads(gradients))
