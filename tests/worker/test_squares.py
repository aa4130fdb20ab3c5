"""Squared gradient norms that ranks of a measured run report: of whole gradients, in few rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.core.forecast.efficiency import noise_scale
from paceline.core.rank import events as ev
from paceline.core.status import Fact
from paceline.worker.metrics.squares import EVERY, GradientSquares
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from torch import nn

SAMPLES = 8


class Rank:
    def __init__(self) -> None:
        self.model = nn.Linear(32, 32, bias=False)
        self.gradients = Gradients(self.model.named_parameters())
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.committed = Committed(self.model, sgd, self.gradients, clip_norm=1e-3)
        self.squares = GradientSquares()

    def announce(self, gradient: torch.Tensor, *, unit: int, finite: bool = True) -> None:
        grad = self.model.weight.grad
        assert grad is not None
        grad.copy_(gradient)
        self.squares.own(ev.Step((), SAMPLES, unit, finite), self.gradients)

    def apply(self, total: torch.Tensor, *, samples: int, divisor: float, unit: int) -> None:
        weighing: Any = SimpleNamespace(first=True, divisor=divisor, unit=unit, samples=samples)
        self.gradients.result[0][: total.numel()].copy_(total.flatten())
        self.committed.accumulate(self.gradients.result, first=True)
        self.committed.apply(divisor, step=True, look=self.squares.look(weighing))


def test_nothing_is_reported_before_both_norms_are_known() -> None:
    rank = Rank()
    for _ in range(EVERY):
        assert rank.squares.facts() == {}
        rank.announce(torch.ones(32, 32), unit=SAMPLES)
    assert rank.squares.facts() == {}


def test_norms_are_taken_from_a_sampled_step_before_clipping() -> None:
    rank = Rank()
    for number in range(1, EVERY + 1):
        # The sum over the samples is divided by half their number, which makes twice the mean.
        rank.announce(torch.full((32, 32), 2.0 * number), unit=SAMPLES // 2)
        rank.apply(torch.full((32, 32), 6.0), samples=2 * SAMPLES, divisor=2.0, unit=SAMPLES)
    facts = rank.squares.facts()
    assert facts[Fact.OWN_BATCH] == SAMPLES
    assert facts[Fact.OWN_SQUARE] == pytest.approx(32 * 32 * EVERY**2)
    assert facts[Fact.MEAN_BATCH] == 2 * SAMPLES
    assert facts[Fact.MEAN_SQUARE] == pytest.approx(32 * 32 * 9.0)


def test_gradients_that_are_no_mean_of_samples_do_not_count() -> None:
    rank = Rank()
    for _ in range(EVERY):
        rank.announce(torch.full((32, 32), torch.nan), unit=SAMPLES, finite=False)
    short: Any = SimpleNamespace(first=True, divisor=2.0, unit=SAMPLES, samples=SAMPLES)
    assert rank.squares.look(short) is None
    assert rank.squares.facts() == {}


def test_the_noise_scale_of_two_ranks_is_estimated_correctly() -> None:
    torch.manual_seed(1)
    rank, signal = Rank(), torch.randn(32, 32)
    scale = 200.0
    spread = (signal.square().sum() * scale / signal.numel()).sqrt()  # tr(cov) = scale |G|²
    for _ in range(40 * EVERY):
        own, other = (signal + spread / SAMPLES**0.5 * torch.randn(32, 32) for _ in range(2))
        rank.announce(own, unit=SAMPLES)
        rank.apply(own + other, samples=2 * SAMPLES, divisor=2.0, unit=SAMPLES)
    facts = rank.squares.facts()
    estimate = noise_scale(
        batch=facts[Fact.OWN_BATCH],
        square=facts[Fact.OWN_SQUARE],
        larger=facts[Fact.MEAN_BATCH],
        larger_square=facts[Fact.MEAN_SQUARE],
    )
    assert estimate == pytest.approx(scale, rel=0.25)
