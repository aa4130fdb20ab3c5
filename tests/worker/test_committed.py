"""The committed state: the user's optimizer, rebound to it, and its transfer to other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.core.protocol.pending import BufferName
from paceline.errors import ChangedLaterError, StateError, UnsupportedError
from paceline.worker.state.codec import Decoder, Encoder, as_tensor
from paceline.worker.state.committed import Committed
from paceline.worker.state.flat import bytes_of
from paceline.worker.state.gradients import Gradients
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, StepLR

Optimizer = torch.optim.Optimizer
Params = Iterator[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "learning rate as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


class Rank:
    """A model with gradients and committed state, built like the training layer builds them."""

    def __init__(
        self,
        make: Callable[[Params], Optimizer] = OPTIMIZERS["momentum"],
        *,
        seed: int = 0,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.model = make_model(seed)
        self.optimizer = make(self.model.parameters())
        self.gradients = Gradients(self.model.named_parameters())
        self.committed = Committed(
            self.model,
            self.optimizer,
            self.gradients,
            scheduler=scheduler,
            clip_norm=clip_norm,
            clip_value=clip_value,
        )

    def round(
        self, seed: int, divisor: float = 1.0, *, first: bool = True, step: bool = True
    ) -> None:
        self.reduce(seed)
        self.committed.accumulate(self.gradients.result, first=first)
        self.committed.apply(divisor, step=step, scheduler_steps=1 if step else 0)
        self.committed.copy_to_model()

    def reduce(self, seed: int) -> None:
        """Fill in a result as if all ranks had summed it."""
        generator = torch.Generator().manual_seed(seed)
        for view in self.gradients.layout.views(self.gradients.result):
            view.copy_(torch.randn(view.shape, generator=generator))

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rebound_optimizer_steps_like_plain_torch(name: str) -> None:
    rank = Rank(OPTIMIZERS[name])
    plain = make_model()
    optimizer = OPTIMIZERS[name](plain.parameters())
    for seed in range(5):
        rank.reduce(seed)
        gradients = [
            view.clone() / 3.0 for view in rank.gradients.layout.views(rank.gradients.result)
        ]
        rank.round(seed, 3.0)
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        assert same(rank.weights(), [p.detach() for p in plain.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averaging_segments_as_they_arrive_gives_the_same_bits(name: str) -> None:
    """Include optimizers that write into their gradients; the sum must be kept."""
    early, late = Rank(OPTIMIZERS[name], clip_norm=0.5), Rank(OPTIMIZERS[name], clip_norm=0.5)
    for seed in range(4):
        early.reduce(seed)
        summed = [flat.clone() for flat in early.gradients.result]
        for segment in range(len(summed) - seed % 2):  # sometimes not all of them
            early.committed.prepare(segment, 3.0)
        early.committed.accumulate(early.gradients.result, first=True)
        early.committed.apply(3.0, step=True, scheduler_steps=1)
        late.round(seed, 3.0)
        assert early.committed.strong_hash() == late.committed.strong_hash()
        kept = [bytes(part) for part in early.committed.last_result()]
        assert kept == [bytes(bytes_of(flat)) for flat in summed]


def test_averages_of_an_aborted_round_are_not_used_in_the_next() -> None:
    early, late = Rank(), Rank()
    early.reduce(1)
    early.committed.prepare(0, 3.0)
    early.committed.forget_prepared()
    for rank in (early, late):
        rank.round(2, 4.0)
    assert early.committed.strong_hash() == late.committed.strong_hash()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rank_that_is_behind_gets_the_same_bits_from_the_last_result(name: str) -> None:
    """Include optimizers that write into their gradients, in the middle of accumulation (R7)."""
    holder, behind = Rank(OPTIMIZERS[name]), Rank(OPTIMIZERS[name])
    for rank in (holder, behind):
        rank.round(1, first=True, step=False)
    holder.round(2, 4.0, first=False)
    served = [bytes(part) for part in holder.committed.last_result()]
    behind.committed.install_result(served)
    behind.committed.apply(4.0, step=True, scheduler_steps=1)
    assert behind.committed.strong_hash() == holder.committed.strong_hash()
    assert behind.committed.hash() == holder.committed.hash()
    for rank in (holder, behind):
        rank.round(3, 2.0)
    assert behind.committed.strong_hash() == holder.committed.strong_hash()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_rank_that_loads_a_snapshot_equals_its_donor(name: str, steps: int) -> None:
    def schedule(optimizer: Optimizer) -> LRScheduler:
        return MultiStepLR(optimizer, [2, 4], gamma=0.3)

    donor = Rank(OPTIMIZERS[name], scheduler=schedule)
    joiner = Rank(OPTIMIZERS[name], seed=9, scheduler=schedule)
    for seed in range(steps):
        donor.round(seed, 2.0)
    donor.round(50, first=True, step=False)  # accumulated but not stepped yet (pacing: Samples)
    donor.model.get_buffer("1.running_mean").fill_(0.25)
    header, buffers = donor.committed.snapshot()
    donor.round(51, 7.0, first=False)  # the snapshot is a copy
    joiner.committed.load(json.loads(json.dumps(header)), buffers)
    joiner.committed.copy_to_model()
    assert torch.equal(joiner.model.get_buffer("1.running_mean"), torch.full((7,), 0.25))
    joiner.round(51, 7.0, first=False)
    for rank in (donor, joiner):
        rank.round(60, 2.0)
    assert same(joiner.weights(), donor.weights())
    assert joiner.committed.strong_hash() == donor.committed.strong_hash()


def test_a_foreign_or_torn_state_is_refused_and_changes_nothing() -> None:
    rank = Rank()
    before = rank.committed.strong_hash()
    other = Gradients([("w", nn.Parameter(torch.ones(3)))])
    module = nn.Module()
    stranger = Committed(module, torch.optim.SGD(other.parameters, lr=0.1), other)
    with pytest.raises(StateError, match="other parameters"):
        rank.committed.load(*stranger.snapshot())
    header, buffers = Rank(seed=1).committed.snapshot()
    with pytest.raises(StateError, match="torn"):
        rank.committed.load(header, buffers[:-1])
    with pytest.raises(StateError, match="torn"):
        rank.committed.load(header, [buffers[0][:-4], *buffers[1:]])
    with pytest.raises(StateError, match="torn"):
        rank.committed.install_result([b"123"])
    assert rank.committed.strong_hash() == before


def test_the_scheduler_takes_the_number_of_steps_it_is_given() -> None:
    rank = Rank(OPTIMIZERS["sgd"], scheduler=lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    rank.reduce(0)
    rank.committed.accumulate(rank.gradients.result, first=True)
    for steps, want in ((1, 0.1), (1, 0.05), (4, 0.0125), (0, 0.0125)):
        rank.committed.apply(1.0, step=True, scheduler_steps=steps)
        assert rank.committed.binding.known[0]["lr"] == want


def test_changing_the_wrapped_optimizer_is_refused() -> None:
    rank = Rank()
    rank.round(1)
    rank.optimizer.param_groups[0]["lr"] = 0.7
    with pytest.raises(ChangedLaterError, match=r"\['lr'\] changed from 0.1 to 0.7"):
        rank.round(2)


@pytest.mark.parametrize("divisor", [1.0, 8.0])
def test_clipping_limits_the_averaged_gradient(divisor: float) -> None:
    rank = Rank(OPTIMIZERS["sgd"], clip_norm=0.5)
    before = rank.weights()
    rank.reduce(3)
    plain = [view.clone() / divisor for view in rank.gradients.layout.views(rank.gradients.result)]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in plain]
    for parameter, gradient in zip(parameters, plain, strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(parameters, 0.5)
    rank.round(3, divisor)
    for now, then, gradient in zip(rank.weights(), before, plain, strict=True):
        torch.testing.assert_close(now, then - 0.1 * gradient)


def test_clipping_by_value_limits_each_update() -> None:
    rank = Rank(OPTIMIZERS["sgd"], clip_value=0.01)
    before = rank.weights()
    rank.round(3)
    for now, then in zip(rank.weights(), before, strict=True):
        assert (now - then).abs().max() <= 0.1 * 0.01 * 1.001


def test_the_norm_has_the_same_bits_with_any_number_of_threads() -> None:
    """Vary the threads, because the ranks of one job may have different numbers of cores."""
    hashes, threads = set(), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            model = nn.Linear(701, 997)
            gradients = Gradients(model.named_parameters())
            committed = Committed(
                model, torch.optim.SGD(model.parameters(), lr=0.1), gradients, clip_norm=1e-3
            )
            for flat in gradients.result:
                flat.copy_(torch.linspace(-1, 3, flat.numel()).sin())
            committed.accumulate(gradients.result, first=True)
            committed.apply(3.0, step=True)
            hashes.add(committed.hash())
    finally:
        torch.set_num_threads(threads)
    assert len(hashes) == 1


def test_writes_of_an_abandoned_reduction_do_not_reach_the_update() -> None:
    one, other = Rank(), Rank()
    one.round(1)
    other.round(1)
    old = one.gradients.result
    one.gradients.renew_result()
    one.reduce(2)
    for flat in old:
        flat.fill_(1e9)
    one.committed.accumulate(one.gradients.result, first=True)
    one.committed.apply(1.0, step=True, scheduler_steps=1)
    other.round(2)
    assert one.committed.strong_hash() == other.committed.strong_hash()


def test_float_buffers_are_packed_into_one_tensor() -> None:
    one, other = Rank(), Rank()
    statistics = one.model[1]
    statistics.get_buffer("running_mean").fill_(2.0)
    flat = one.committed.float_buffers_flat()
    assert flat.numel() == 14  # mean and variance; the batch counter is an integer
    other.committed.load_float_buffers((flat + other.committed.float_buffers_flat()) / 2)
    assert torch.equal(other.model.get_buffer("1.running_mean"), torch.ones(7))


class Spectral(nn.Module):
    """A filter of complex numbers beside a real layer, like those of Fourier neural operators."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.filter = nn.Parameter(torch.randn(3, 4, dtype=dtype))
        self.phase = nn.Parameter(torch.randn((), dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(2, dtype=dtype), requires_grad=False)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.randn(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.einsum("bi,io->bo", x.to(self.filter.dtype), self.filter) * self.phase
        result: torch.Tensor = self.linear((made.abs() + made.real).float())
        return result


COMPLEX = [torch.complex64, torch.complex128]


class SpectralRank(Rank):
    def __init__(
        self, make: Callable[[Params], Optimizer], dtype: torch.dtype, **more: Any
    ) -> None:
        self.model = Spectral(dtype, more.pop("seed", 0))  # type: ignore[assignment]
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = make(iter([p for _, p in trained]))
        self.gradients = Gradients(trained)
        self.committed = Committed(self.model, self.optimizer, self.gradients, **more)

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 3, generator=generator)
        self.model(x).square().sum().backward()
        self.gradients.attach()
        self.gradients.swap()
        self.gradients.load_results(BufferName.LATE)
        self.gradients.zero(BufferName.LATE)
        self.committed.accumulate(self.gradients.result, first=True)
        self.committed.apply(1.0, step=True)
        self.committed.copy_to_model()


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("name", ["momentum", "adamw", "adagrad"])
def test_complex_parameters_are_updated_as_in_plain_torch(name: str, dtype: torch.dtype) -> None:
    rank, plain = SpectralRank(OPTIMIZERS[name], dtype), Spectral(dtype, 0)
    reference = OPTIMIZERS[name](p for p in plain.parameters() if p.requires_grad)
    assert not any(flat.is_complex() for flat in rank.gradients.result)
    for seed in range(3):
        rank.train(seed)
        reference.zero_grad()
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        plain(x).square().sum().backward()
        reference.step()
    for one, other in zip(rank.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_a_rank_that_loads_a_complex_state_equals_its_donor(dtype: torch.dtype) -> None:
    donor, joiner = (SpectralRank(OPTIMIZERS["adamw"], dtype, seed=seed) for seed in (0, 1))
    donor.train(0)
    header, buffers = donor.committed.snapshot()
    joiner.committed.load(json.loads(json.dumps(header)), [bytes(b) for b in buffers])
    joiner.committed.copy_to_model()
    for member in (donor, joiner):
        member.train(1)
    assert donor.committed.hash() == joiner.committed.hash()
    assert donor.committed.strong_hash() == joiner.committed.strong_hash()
    mine, other = donor.model.state_dict(), joiner.model.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("part", [complex(float("nan"), 0), complex(0, float("inf"))])
def test_a_complex_gradient_that_is_not_finite_is_found(part: complex) -> None:
    rank = SpectralRank(OPTIMIZERS["sgd"], torch.complex64)
    rank.model.filter.grad[1, 2] = part  # type: ignore[assignment, index, operator]
    assert not rank.gradients.finite(BufferName.GRAD)


def test_complex_gradients_are_clipped_by_their_norm() -> None:
    rank = SpectralRank(OPTIMIZERS["sgd"], torch.complex64, clip_norm=1.0)
    plain = Spectral(torch.complex64, 0)
    rank.train(0)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    plain(torch.randn(5, 3, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    reference.step()
    for one, other in zip(rank.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    SpectralRank(OPTIMIZERS["sgd"], torch.complex64, clip_value=0.1).train(0)


def test_complex_buffers_are_averaged_with_the_others() -> None:
    rank = SpectralRank(OPTIMIZERS["sgd"], torch.complex64)
    mean = rank.model.mean.clone()  # type: ignore[operator]
    flat = rank.committed.float_buffers_flat()
    assert flat.numel() == 2 * mean.numel()
    rank.committed.load_float_buffers(flat * 2)
    assert torch.equal(rank.model.mean, mean * 2)  # type: ignore[arg-type]


def test_the_hash_covers_frozen_parameters_but_no_buffers() -> None:
    ranks = [SpectralRank(OPTIMIZERS["sgd"], torch.complex64) for _ in range(2)]
    one, other = (rank.committed for rank in ranks)
    ranks[0].model.mean.fill_(7)  # type: ignore[operator]
    assert one.hash() == other.hash()
    with torch.no_grad():
        frozen: Any = ranks[0].model.frozen
        frozen[1] += 1
    assert one.hash() != other.hash()
    header, buffers = other.snapshot()
    one.load(json.loads(json.dumps(header)), [bytes(b) for b in buffers])
    assert one.hash() == other.hash(), "before the main thread has been parked"
    one.copy_to_model()
    assert one.hash() == other.hash()


def with_buffers(**shapes: tuple[int, ...]) -> Rank:
    rank = Rank()
    for name, shape in shapes.items():
        persistent = not name.startswith("own")
        rank.model.register_buffer(name, torch.ones(shape), persistent=persistent)
    return rank


@pytest.mark.parametrize(
    ("donor", "joiner", "words"),
    [
        ({"seen": (3,)}, {}, r"seen: shape \(3,\) in the model of the job, none on this rank"),
        ({}, {"seen": (3,)}, r"seen: none in the model of the job, shape \(3,\) on this rank"),
        ({"seen": (4,)}, {"seen": (3,)}, r"seen: shape \(4,\) in .*, shape \(3,\) on this rank"),
    ],
)
def test_the_error_names_the_first_buffer_that_differs(
    donor: dict[str, Any], joiner: dict[str, Any], words: str
) -> None:
    """Cover buffers that are registered or resized in forward()."""
    header, buffers = with_buffers(**donor).committed.snapshot()
    with pytest.raises(StateError, match=words) as caught:
        with_buffers(**joiner).committed.load(
            json.loads(json.dumps(header)), [bytes(b) for b in buffers]
        )
    assert "persistent=False" in caught.value.hint


def test_non_persistent_buffers_are_excluded() -> None:
    donor, joiner = with_buffers(own=(4,), seen=(2,)), with_buffers(own=(3,), seen=(2,))
    own = joiner.model.get_buffer("own").fill_(7)
    assert len(donor.committed.float_buffers_flat()) == len(joiner.committed.float_buffers_flat())
    header, buffers = donor.committed.snapshot()
    joiner.committed.load(json.loads(json.dumps(header)), [bytes(b) for b in buffers])
    joiner.committed.copy_to_model()
    assert torch.equal(own, torch.full((3,), 7.0))
    assert set(donor.committed.copy().model) == set(donor.model.state_dict())


def test_the_memory_report_counts_three_buffers() -> None:
    rank = Rank()
    report = rank.committed.memory_report()
    assert str(report).startswith("3 buffers of ")
    elements = sum(parameter.numel() for parameter in rank.model.parameters())
    assert report.parameters == elements
    assert 4 * elements <= report.buffer_bytes <= 4 * elements + 64 * 6


def test_only_plain_sgd_without_clipping_counts_as_linear() -> None:
    assert Rank(OPTIMIZERS["sgd"]).committed.linear()[0]
    for name, why in (("momentum", "weight decay"), ("adamw", "not known to be linear")):
        linear, text = Rank(OPTIMIZERS[name]).committed.linear()
        assert not linear
        assert why in text
    assert "clipping" in Rank(OPTIMIZERS["sgd"], clip_norm=1.0).committed.linear()[1]


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.int64]).map(
        lambda dtype: torch.arange(3).to(dtype)
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.long
@given(value=plain_values)
@settings(deadline=None)
def test_an_encoded_state_decodes_to_the_same_value(value: object) -> None:
    encoder = Encoder(as_tensor)
    text = json.dumps(encoder.encode(value, "x"))
    back = Decoder([bytes_of(b) for b in encoder.buffers]).decode(
        json.loads(text), torch.device("cpu")
    )
    assert equal(value, back)


@pytest.mark.parametrize("rows", [3, 1500])
def test_a_copy_on_the_host_is_contiguous_and_in_memory_of_its_own(rows: int) -> None:
    """Copy a few values, and so many that the copy lies in huge pages."""
    tensor = torch.arange(rows * 1000.0).reshape(1000, rows).T
    want, copy = tensor.clone(), as_tensor(tensor)
    tensor.zero_()
    assert copy.is_contiguous()
    assert copy.equal(want)


def test_the_error_names_a_value_that_cannot_be_encoded() -> None:
    with pytest.raises(UnsupportedError, match=r"state\['x'\] is a set"):
        Encoder(as_tensor).encode({"x": {1, 2}}, "state")
