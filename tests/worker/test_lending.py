"""The model shares memory with the committed weights if every round waits for all ranks (D2).

Three things must never happen: a weight changes during a forward or backward pass, a weight that
the script wrote gets into the committed state, or any bit differs from training with copies.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from torch import nn

from testing.examples import examples
from tests.worker.test_committed import Rank, same

ACTS = ("update", "park", "lend", "copy", "own", "load", "point elsewhere", "write while parted")


def lent(rank: Rank) -> bool:
    """Return True if a weight of the model shares memory with the committed state."""
    views = rank.committed._views
    pairs = zip(rank.model.parameters(), views, strict=True)
    return any(parameter.data_ptr() == view.data_ptr() for parameter, view in pairs)


@given(st.lists(st.sampled_from(ACTS), max_size=14))
@settings(max_examples=examples(150), deadline=None)
def test_lending_changes_no_bit(acts: list[str]) -> None:
    lends, copies, other = Rank(), Rank(), Rank(seed=3)
    parked = True
    for number, act in enumerate(acts):
        before = lends.weights()
        match act:
            case "update":
                for rank in (lends, copies):
                    rank.reduce(number)
                    rank.committed.accumulate(rank.gradients.result, first=True)
                    rank.committed.apply(2.0, step=True)
            case "load":
                other.round(number)
                for rank in (lends, copies):
                    rank.committed.load(*other.committed.snapshot())
            case "park":
                parked = True
                lends.committed.take_back()
            case "lend" | "copy" if parked:
                lends.committed.copy_to_model(lend=act == "lend")
                copies.committed.copy_to_model()
                parked = False
                assert same(lends.weights(), copies.weights())
                assert lent(lends) == (act == "lend")
            case "own":  # as before pl.evaluating()
                lends.committed.part_from_model()
                assert not lent(lends)
            case "write while parted" if not parked and not lent(lends):
                with torch.no_grad():
                    next(lends.model.parameters()).add_(1.0)
                continue
            case "point elsewhere":
                parameter = next(lends.model.parameters())
                parameter.data = torch.full_like(parameter, number)
                continue
        if not parked and act not in ("lend", "copy"):
            assert same(before, lends.weights()), "a weight changed while the script computes"
        assert lends.committed.hash() == copies.committed.hash()
    assert lends.committed.strong_hash() == copies.committed.strong_hash()


def test_lending_copies_nothing_and_takes_no_memory() -> None:
    rank = Rank()
    rank.committed.copy_to_model(lend=True)
    flats = rank.committed._weights
    for seed in range(3):
        rank.committed.take_back()
        rank.reduce(seed)
        rank.committed.accumulate(rank.gradients.result, first=True)
        rank.committed.apply(1.0, step=True)
        rank.committed.copy_to_model(lend=True)
        assert rank.committed._weights is flats
    storages = {p.untyped_storage().data_ptr() for p in rank.model.parameters()}
    assert storages == {flat.untyped_storage().data_ptr() for flat in flats}


def test_backward_of_a_graph_kept_over_a_step_is_refused() -> None:
    """Keep a graph over a step, which fails with any optimizer.

    Its backward() would mix the weights of two versions.
    """
    rank = Rank()
    rank.committed.copy_to_model(lend=True)
    loss = rank.model(torch.ones(4, 5)).square().sum()
    rank.committed.take_back()
    rank.reduce(1)
    rank.committed.accumulate(rank.gradients.result, first=True)
    rank.committed.apply(1.0, step=True)
    rank.committed.copy_to_model(lend=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_cannot_share_memory_are_copied() -> None:
    """Use a float32 master and memory whose order differs from the flat one."""

    def made(model: nn.Sequential) -> tuple[Committed, Gradients]:
        gradients = Gradients(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Committed(model, optimizer, gradients), gradients

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(2, 2))
    model[1].to(torch.bfloat16)
    twin = copy.deepcopy(model)
    (lends, mine), (copies, its) = made(model), made(twin)
    for version in range(3):
        lends.take_back()
        for committed, gradients in ((lends, mine), (copies, its)):
            for flat in gradients.result:
                flat.fill_(version + 0.5)
            committed.accumulate(gradients.result, first=True)
            committed.apply(2.0, step=True)
        lends.copy_to_model(lend=True)
        copies.copy_to_model()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
    assert not model.get_parameter("0.weight").is_contiguous()
    assert model.get_parameter("0.bias").data_ptr() in {view.data_ptr() for view in lends._views}
    assert model[1].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("lend", [False, True])
def test_only_copies_keep_script_writes_out_of_the_committed_weights(lend: bool) -> None:
    """Show why nothing is lent where a round may proceed without a rank.

    That rank misses a version, and with it what its script does to the weights of each one, such as
    `p.data.clamp_()` after step().
    """
    ranks = present, late = Rank(), Rank()

    def goes_on(rank: Rank) -> None:
        rank.committed.copy_to_model(lend=lend)
        for parameter in rank.model.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    for version in range(3):
        for rank in ranks:
            if rank is present or version != 1:
                goes_on(rank)
                rank.committed.take_back()
            rank.reduce(version)
            rank.committed.accumulate(rank.gradients.result, first=True)
            rank.committed.apply(2.0, step=True)
    same_weights = present.committed.hash() == late.committed.hash()
    assert same_weights is not lend
