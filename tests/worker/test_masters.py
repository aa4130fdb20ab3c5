"""Models in bfloat16 and float16: steps, sums, snapshots and checkpoints use float32."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from paceline.core.protocol.pending import BufferName
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from torch import nn

HALVES = [torch.bfloat16, torch.float16]
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
}


def make_model(dtype: torch.dtype) -> nn.Sequential:
    """Make a half-precision layer and a norm in float32, as is common."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8).to(dtype), nn.LayerNorm(8))


class Rank:
    def __init__(self, dtype: torch.dtype, name: str = "sgd") -> None:
        self.model = make_model(dtype)
        self.optimizer = OPTIMIZERS[name](list(self.model.parameters()))
        self.start()

    def start(self) -> None:
        self.gradients = Gradients(self.model.named_parameters())
        self.committed = Committed(self.model, self.optimizer, self.gradients)

    def round(self, seed: int, divisor: float = 3.0) -> list[torch.Tensor]:
        """Run a round and return the average of each parameter in float32."""
        fill(list(self.gradients.parameters), seed)
        self.gradients.load_results(BufferName.GRAD, 3.0)
        views = self.gradients.layout.views(self.gradients.result)
        averages = [view.clone() / divisor for view in views]
        self.committed.accumulate(self.gradients.result, first=True)
        self.committed.apply(divisor, step=True)
        self.committed.copy_to_model()
        return averages


def fill(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_precision_steps_like_plain_torch_with_float32_masters(
    dtype: torch.dtype, name: str
) -> None:
    rank = Rank(dtype, name)
    masters = [nn.Parameter(p.detach().float()) for p in make_model(dtype).parameters()]
    optimizer = OPTIMIZERS[name](masters)
    for seed in range(20):
        averages = rank.round(seed)
        for master, average in zip(masters, averages, strict=True):
            assert average.dtype is torch.float32
            master.grad = average
        optimizer.step()
        for parameter, master in zip(rank.model.parameters(), masters, strict=True):
            assert torch.equal(parameter, master.to(parameter.dtype))
    kept = rank.committed.copy().model
    for (parameter_name, _), master in zip(rank.model.named_parameters(), masters, strict=True):
        assert torch.equal(kept[parameter_name], master)


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALVES)
def test_updates_below_half_precision_accumulate(dtype: torch.dtype) -> None:
    """Take 4,000 steps of 2^-16 on a weight of 1, where the next bfloat16 is 2^-7 away."""
    model = nn.Linear(4, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-16)
    gradients = Gradients(model.named_parameters())
    committed = Committed(model, optimizer, gradients)
    for _ in range(4000):
        assert model.weight.grad is not None
        model.weight.grad.fill_(1.0)
        gradients.load_results(BufferName.GRAD)
        committed.accumulate(gradients.result, first=True)
        committed.apply(1.0, step=True)
        committed.copy_to_model()
    want = torch.tensor(1 - 4000 * 2.0**-16).to(dtype)
    assert torch.equal(model.weight.detach(), want.expand(1, 4))


def test_gradients_keep_the_dtype_of_their_parameters() -> None:
    rank = Rank(torch.bfloat16)
    inputs = torch.ones(2, 6, dtype=torch.bfloat16)
    loss = rank.model[1](rank.model[0](inputs).float()).square().sum()
    loss.backward()
    assert rank.gradients.touched()
    assert [p.grad.dtype for p in rank.model.parameters() if p.grad is not None] == [
        torch.bfloat16, torch.bfloat16, torch.float32, torch.float32,
    ]  # fmt: skip
    rank.gradients.swap()  # late gradients wait in that type too
    rank.gradients.load_results(BufferName.LATE)
    assert {flat.dtype for flat in rank.gradients.result} == {torch.float32}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_joiners_and_checkpoints_get_the_masters(name: str) -> None:
    donor, joiner, restored = (Rank(torch.bfloat16, name) for _ in range(3))
    for seed in range(3):
        donor.round(seed)
    header, buffers = donor.committed.snapshot()
    joiner.committed.load(json.loads(json.dumps(header)), buffers)
    kept = donor.committed.copy()
    restored.committed.load_copy(json.loads(json.dumps(kept.header)), kept.model, kept.buffers)
    for rank in (joiner, restored):
        assert rank.committed.hash() == donor.committed.hash()
        assert rank.committed.strong_hash() == donor.committed.strong_hash()
    for rank in (donor, joiner, restored):
        rank.round(9)
    assert len({rank.committed.strong_hash() for rank in (donor, joiner, restored)}) == 1


def test_the_hash_covers_master_bits_that_bfloat16_cannot_show() -> None:
    one, other = Rank(torch.bfloat16), Rank(torch.bfloat16)
    for rank, divisor in ((one, 3.0), (other, 3.0001)):
        rank.round(1, divisor)
    for mine, its in zip(one.model[0].parameters(), other.model[0].parameters(), strict=True):
        assert torch.equal(mine, its)
    assert one.committed.hash() != other.committed.hash()


def test_existing_optimizer_state_of_a_half_precision_model_becomes_float32() -> None:
    """Use an optimizer that stepped, or loaded its state, before training starts."""
    rank = Rank(torch.bfloat16, "adamw")
    rank.optimizer = OPTIMIZERS["adamw"](list(rank.model.parameters()))
    fill(list(rank.model.parameters()), 4)
    rank.optimizer.step()
    rank.start()
    state = list(rank.optimizer.state.values())
    assert {values["exp_avg"].dtype for values in state} == {torch.float32}
    rank.round(5)


def test_segments_are_sized_by_their_float32_sums() -> None:
    """Count four bytes for each half-precision element, in a sum and on the wire."""
    named = [(str(index), nn.Parameter(torch.ones(1000).half())) for index in range(8)]
    half = Gradients(named, segment_bytes=4 * 2100).layout
    single = Gradients([(n, nn.Parameter(p.float())) for n, p in named], 4 * 2100).layout
    assert [slot.segment for slot in half.slots] == [slot.segment for slot in single.slots]
    assert half.fingerprint() != single.fingerprint()
    assert half.largest_bytes < 4 * 3200
