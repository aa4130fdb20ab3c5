"""Rounding residuals are added to the next round exactly once, whatever happens to rounds (D18).

All numbers are integers small enough that each float32 sum is exact; most cannot be represented in
bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.core.collectives.schedules import ALGORITHMS, fold, schedule
from paceline.core.protocol.pending import BufferName
from paceline.worker.state.gradients import Gradients
from paceline_api.types.enums import Wire
from torch import nn

NUMEL = 5
UNITS = (1, 2, 4)


def new_rank() -> Gradients:
    named = [("w", nn.Parameter(torch.zeros(NUMEL))), ("v", nn.Parameter(torch.zeros(3)))]
    return Gradients(named, wire=Wire.BFLOAT16)


@dataclass
class Group:
    """Ranks and an account of their gradients, in sums of per-sample gradients."""

    algorithm: str
    ranks: list[Gradients]
    given: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    applied: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    lost: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        numel = self.ranks[0].layout.segments[0].numel
        self.given, self.applied, self.lost = (torch.zeros(numel) for _ in range(3))

    def load(self, named: set[int], unit: int, seed: int) -> torch.Tensor:
        """Load and return the new gradients of the ranks that GO names; the others add zeros."""
        draw, new = torch.Generator().manual_seed(seed), torch.zeros_like(self.given)
        for index, rank in enumerate(self.ranks):
            rank.zero(BufferName.GRAD)
            source = BufferName.GRAD if index in named else None
            for parameter in rank.parameters:
                parts = torch.randint(-1000, 1001, parameter.shape, generator=draw)
                assert parameter.grad is not None
                parameter.grad.add_(parts)
            rank.load_results(source, 1.0, unit if named else 0)
            if source is not None:
                new += rank._flats[source][0] * unit
        return new

    def reduce(self) -> torch.Tensor:
        """Sum the results of all ranks like the data channel."""
        chunks = schedule(self.algorithm, len(self.ranks), 0).chunks
        total = torch.empty_like(self.given)
        for chunk, there in enumerate(torch.arange(len(total)).tensor_split(chunks)):

            def rounded(part: torch.Tensor, rank: int, there: torch.Tensor = there) -> torch.Tensor:
                away = self.ranks[rank].rounded_away[0]
                assert away is not None
                away[there] += part - part.bfloat16().float()
                return part.bfloat16().float()

            parts = [rank.result[0][there] for rank in self.ranks]
            total[there] = fold(self.algorithm, parts, chunk, torch.add, rounded)
        return total

    def residual(self, rank: Gradients) -> torch.Tensor:
        held = rank._residuals[0]
        assert held is not None
        return held * rank._residual_unit

    def commit(self, named: set[int], unit: int, seed: int) -> None:
        new = self.load(named, unit, seed)
        total = self.reduce() if len(self.ranks) > 1 else self.ranks[0].result[0]
        if named:  # otherwise the log applies nothing
            self.given += new
            self.applied += total * unit
        for rank in self.ranks:
            rank.keep_residuals(unit if named else 0)

    def abandon(self, named: set[int], unit: int, seed: int, *, void: bool) -> None:
        """Abort a round: a segment was flagged, or a rank died and the round is repeated."""
        self.load(named, unit, seed)
        if void:
            self.reduce()

    def replace(self, index: int) -> None:
        """Lose a rank and let another one join in its place."""
        self.lost += self.residual(self.ranks[index])
        self.ranks[index] = new_rank()

    def check(self) -> None:
        held = torch.stack([self.residual(rank) for rank in self.ranks]).sum(0)
        assert torch.equal(self.applied + held + self.lost, self.given)


MEMBERS = st.sets(st.integers(0, 4))
ROUNDS = st.tuples(
    st.sampled_from(["commit", "commit", "commit", "void", "abandon", "replace"]),
    MEMBERS,
    st.sampled_from(UNITS),
    st.integers(0, 99),
)


@pytest.mark.long
@given(st.sampled_from(ALGORITHMS), st.integers(1, 5), st.lists(ROUNDS, max_size=12))
@settings(deadline=None)
def test_applied_sums_and_residuals_add_up_to_all_gradients(
    algorithm: str, size: int, rounds: list[tuple[str, set[int], int, int]]
) -> None:
    group = Group(algorithm, [new_rank() for _ in range(size)])
    for what, members, unit, seed in rounds:
        named = {member for member in members if member < size}
        match what:
            case "commit":
                group.commit(named, unit, seed)
            case "replace":
                group.replace(seed % size)
            case _:
                group.abandon(named, unit, seed, void=what == "void")
        group.check()


def test_a_residual_is_at_most_half_a_bfloat16_step_of_the_sum() -> None:
    """Check that a residual does not grow with the number of rounds."""
    group = Group("ring", [new_rank() for _ in range(4)])
    for seed in range(50):
        group.commit({0, 1, 2, 3}, 1, seed)
        largest = max(float(group.residual(rank).abs().max()) for rank in group.ranks)
        assert 0 < largest <= 5000 * 2**-8


def test_a_rank_that_loads_another_state_drops_its_residuals() -> None:
    group = Group("ring", [new_rank() for _ in range(3)])
    group.commit({0, 1, 2}, 1, 3)
    assert group.residual(group.ranks[1]).any()
    group.ranks[1].forget_residuals()
    assert not group.residual(group.ranks[1]).any()


def test_the_fingerprint_depends_on_the_wire_type() -> None:
    named = [("w", nn.Parameter(torch.zeros(NUMEL)))]
    prints = {Gradients(named, wire=wire).fingerprint() for wire in Wire}
    assert len(prints) == len(Wire)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_float32_sums_are_rounded(dtype: torch.dtype) -> None:
    gradients = Gradients([("w", nn.Parameter(torch.zeros(4, dtype=dtype)))], wire=Wire.BFLOAT16)
    (away,) = gradients.rounded_away
    assert (away is None) is (dtype is torch.float64)
    gradients.load_results(BufferName.GRAD, 1.0, 1)
    gradients.keep_residuals(1)
