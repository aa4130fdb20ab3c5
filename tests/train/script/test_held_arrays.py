"""A rank that joins takes over the arrays that a script carries in variables of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from paceline.train.script.held_arrays import (
    COPIED_BYTES,
    HeldArrays,
    SentArrays,
    is_array,
    sent,
    settled_arrays,
)
from paceline.train.script.own_counts import CarriedValues, OwnCounts, plain
from paceline.train.script.reach import reach
from torch.utils.data import Dataset

Donor = tuple[Any, SentArrays]


def donated(reading: CarriedValues) -> Donor:
    arrays = {
        path: {name: sent(value) for name, value in held.items()}
        for path, held in reading.arrays.items()
    }
    return plain(reading.numbers), arrays


class Statistics:
    def __init__(self) -> None:
        self.mean = np.zeros(3)
        self.momentum: torch.Tensor | None = None
        self.largest = torch.zeros(3)
        self.of_rank = torch.zeros(3)

    def update(self, x: torch.Tensor) -> None:
        self.mean = 0.5 * self.mean + 0.5 * x.numpy()
        if self.momentum is None:
            self.momentum = x.clone()
        else:
            self.momentum = 0.5 * self.momentum + x
        torch.maximum(self.largest, x, out=self.largest)
        self.of_rank += x


class Numbers(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.reads, self.weights = torch.zeros(4), torch.ones(4)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        return torch.full((3,), float(index))


def follower() -> tuple[Callable[[torch.Tensor], None], Callable[[], torch.Tensor]]:
    center = torch.zeros(3)

    def follow(x: torch.Tensor) -> None:
        nonlocal center
        center = 0.5 * center + 0.5 * x

    return follow, lambda: center


def train(counts: OwnCounts, batches: int, donor: Donor | None = None) -> Any:
    """Take batches; then return what is carried, or take over a donor's and return what it is."""
    statistics, state, data = Statistics(), {"prior": torch.ones(2)}, Numbers()
    bank, large = torch.zeros(4), torch.zeros(COPIED_BYTES)
    alias, history = bank, torch.zeros(0)
    follow, center = follower()
    for at in range(batches):
        images = data[at]
        images = images * 2.0
        statistics.update(images)
        state["prior"] = 0.5 * state["prior"] + images[:2]
        bank[at % 4] = float(at)
        large.add_(1.0)
        history = torch.cat([history, images[:1]])
        data.weights[at] = 0.5
        follow(images)
    counts.begin(reach())
    if donor is None:
        return counts.read()
    counts.take(*donor)
    assert alias is bank, "an array that changes in place stays the same object"
    return [
        statistics.mean.tolist(),
        None if statistics.momentum is None else statistics.momentum.tolist(),
        statistics.largest.tolist(),
        state["prior"].tolist(),
        bank.tolist(),
        large[:2].tolist(),
        history.tolist(),
        center().tolist(),
        data.weights.tolist(),
        [statistics.of_rank.tolist(), data.reads.tolist()],
    ]


@pytest.mark.parametrize("batches", [0, 1])
def test_arrays_become_those_of_the_donor(batches: int) -> None:
    donor = donated(train(OwnCounts(), 3))
    *carried, own = train(OwnCounts(), batches, donor)
    *expected, _ = train(OwnCounts(), 3, ([], {}))
    assert carried == expected
    assert own == train(OwnCounts(), batches, ([], {}))[-1] if batches else own[0] == [0.0] * 3


def test_a_reading_keeps_the_values_of_its_moment() -> None:
    def carry(counts: OwnCounts) -> tuple[CarriedValues, torch.Tensor, np.ndarray[Any, Any]]:
        bank, errors = torch.zeros(4), np.zeros(4)
        reading = CarriedValues()
        for at in range(2):
            bank[at] += 1.0
            errors[at] += 1.0
            if at == 0:
                reading = counts.read()
        return reading, bank, errors

    reading, bank, errors = carry(OwnCounts())
    [held] = reading.arrays.values()
    assert held["bank"].tolist() == [1.0, 0.0, 0.0, 0.0] != bank.tolist()
    assert held["errors"].tolist() == [1.0, 0.0, 0.0, 0.0] != errors.tolist()


def test_an_array_of_another_form_is_replaced() -> None:
    def carry(counts: OwnCounts, size: int, donor: Donor | None = None) -> Any:
        bank = torch.zeros(size)
        for at in range(size):
            bank[at] = 1.0
        if donor is None:
            return counts.read()
        counts.take(*donor)
        return bank.tolist()

    donor = donated(carry(OwnCounts(), 3))
    assert carry(OwnCounts(), 2, donor) == [1.0, 1.0, 1.0]


@pytest.mark.filterwarnings("error")
def test_an_array_that_is_a_view_without_dimensions_or_read_only_can_be_sent() -> None:
    fixed = np.ones(3)
    fixed.flags.writeable = False
    for array in (np.arange(4.0)[::-2], np.array(2.0), fixed):
        is_numpy, values = sent(array)
        assert is_numpy
        assert values.numpy().tolist() == array.tolist()


def test_only_arrays_without_a_gradient_are_carried() -> None:
    weights = torch.zeros(3, requires_grad=True)
    assert not is_array(weights)
    assert not is_array(weights * 2)
    assert not is_array(torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    assert not is_array(torch.zeros(3).to_sparse())
    assert not is_array(np.array(["text"]))
    assert not is_array(np.zeros(3, dtype=">f4"))
    assert is_array(torch.zeros(3, dtype=torch.int64))
    assert is_array(np.zeros(3, dtype=bool))


def test_between_passes_only_arrays_that_outlive_an_epoch_are_taken() -> None:
    def held(**values: float) -> HeldArrays:
        return {"main": {name: torch.full((2,), value) for name, value in values.items()}}

    before = held(weights=1.0, settled=0.0, reset=0.0)
    after = held(weights=1.0, settled=1.0, reset=1.0)
    now = held(weights=2.0, settled=1.0, reset=2.0, evaluated=3.0)
    resets = {"main": {"reset", "settled", "evaluated"}}
    kept = settled_arrays(now, before, after, resets)
    assert kept["main"].keys() == {"weights", "settled"}
    assert settled_arrays(now, {}, {}, resets) == {}


def test_an_array_that_has_changed_its_type_or_device_can_be_compared() -> None:
    first = {"main": {"reset": torch.zeros(2), "moved": torch.zeros(2, device="meta")}}
    now = {"main": {"reset": torch.zeros(2).double(), "moved": torch.zeros(2)}}
    kept = settled_arrays(now, first, now, {"main": {"reset", "moved"}})
    assert kept == now
