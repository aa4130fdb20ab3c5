"""A rank that joins takes over what the script counts by itself."""

from __future__ import annotations

import importlib
import itertools
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paceline.train.script.own_counts import Counts, OwnCounts, plain, settled
from paceline.train.script.reach import reach
from paceline.worker.script_engine import LeftBehindError
from torch.utils.data import IterableDataset


class Patience:
    def __init__(self) -> None:
        self.best: float | None = None

    def see(self, loss: float) -> None:
        if self.best is None or loss < self.best:
            self.best = loss


def search(counts: OwnCounts, losses: list[float], donor: Counts | None = None) -> Any:
    best, state, patience = float("inf"), {"best": -1.0}, Patience()
    for loss in losses:
        best = min(best, loss)
        state["best"] = max(state["best"], loss)
        patience.see(loss)
    counts.begin(reach())
    if donor is None:
        return json.loads(json.dumps(counts.read().numbers))
    counts.take(donor, {})
    return best, state["best"], patience.best


def test_best_values_become_those_of_the_donor() -> None:
    assert search(OwnCounts(), [], search(OwnCounts(), [3.0, 1.5, 2.0])) == (1.5, 3.0, 1.5)
    assert search(OwnCounts(), [2.0], search(OwnCounts(), [])) == (float("inf"), -1.0, None)


class Schedule:
    def __init__(self) -> None:
        self.updates, self.state = 0, SimpleNamespace(updates=0)
        self.log = {"seen": 0}

    def step(self) -> None:
        self.updates += 1
        self.state.updates += 1
        self.log["seen"] += 1


def train(counts: OwnCounts, steps: int, donor: Counts | None = None) -> Any:
    """Make steps; then return the counts, or take those of a donor and return what they are."""
    schedule, state, step, rank = Schedule(), {"seen": 0, "slot": steps}, 0, steps
    args, entries = Namespace(updates=0, slot=steps), Counter[str]()
    while step < steps:
        schedule.step()
        state["seen"] += 1
        args.updates += 1
        entries["seen"] += 1
        step += 1
    counts.begin(reach())
    if donor is None:
        return counts.read().numbers
    counts.take(donor, {})
    of_schedule = schedule.updates, schedule.state.updates, schedule.log["seen"]
    return step, of_schedule, state, vars(args), entries["seen"], rank


def test_variables_attributes_and_entries_become_those_of_the_donor() -> None:
    donor = train(OwnCounts(), 9)
    entries = {"seen": 9, "slot": 2}, {"updates": 9, "slot": 2}
    assert train(OwnCounts(), 2, donor) == (9, (9, 9, 9), *entries, 9, 2)


def test_counts_of_other_running_functions_are_not_taken() -> None:
    donor = train(OwnCounts(), 9)

    def outer() -> Any:
        return train(OwnCounts(), 2, donor)

    assert outer()[0] == 2


def in_a_loop(at: int, donor: Counts | None = None) -> Counts:
    counts = OwnCounts()
    for step in range(10):
        if step == at and donor is None:
            return counts.read().numbers
        if step == at and donor is not None:
            counts.take(donor, {})
    return []


def test_a_loop_over_a_range_has_to_be_where_that_of_the_donor_is() -> None:
    in_a_loop(4, in_a_loop(4))
    with pytest.raises(
        LeftBehindError, match=r"test_own_counts.py:\d+: the loop over `step` is at 2"
    ):
        in_a_loop(2, in_a_loop(4))


def in_a_shared_loop(rank: int, donor: Counts | None = None) -> Counts:
    counts = OwnCounts()
    for _sample in range(rank, 10, 2):
        if donor is None:
            return counts.read().numbers
        counts.take(donor, {})
    return []


def test_a_loop_that_shares_numbers_between_ranks_may_be_elsewhere() -> None:
    in_a_shared_loop(1, in_a_shared_loop(0))


class Warmup:
    steps = 0

    def __init__(self) -> None:
        self.rates = iter([float(number) for number in range(20)])

    def step(self) -> float:
        Warmup.steps += 1
        return next(self.rates)


def closure() -> Callable[[], int]:
    calls = 0

    def step() -> int:
        nonlocal calls
        calls += 1
        return calls

    return step


def schedule() -> Iterator[float]:
    temperature = 1.0
    while True:
        yield temperature
        temperature *= 0.5


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 8.0

    def forward(self) -> float:
        self.temperature *= 0.5
        return self.temperature


def evolve(batches: int, donor: Counts | None = None) -> Any:
    """Carry numbers from batch to batch; return them, or take a donor's and go on by one batch."""
    Warmup.steps = 0
    warmup, step, numbers = Warmup(), closure(), itertools.count(5)
    total, mean, weight = torch.zeros(()), np.float32(0), 1.0
    gates = torch.nn.Sequential(torch.nn.Linear(1, 1), Gate())
    temperatures, values = schedule(), iter(range(3, 30))
    step.done = 0  # type: ignore[attr-defined]

    def batch() -> list[float]:
        nonlocal total, mean, weight
        total = total + torch.tensor(2.0, requires_grad=True)
        mean += np.float32(1.5)
        weight = min(4.0, weight * 1.5)
        step.done += 1  # type: ignore[attr-defined]
        carried = [step(), step.done, Warmup.steps, total.item(), mean.item()]  # type: ignore[attr-defined]
        temperature = next(temperatures) * gates[1]()
        return [*carried, weight, warmup.step(), next(numbers), temperature, next(values)]

    for _ in range(batches):
        batch()
    counts = OwnCounts()
    counts.begin(reach())
    if donor is None:
        return json.loads(json.dumps(plain(counts.read().numbers)))
    counts.take(donor, {})
    return batch()


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_all_numbers_that_a_script_carries_go_on_as_those_of_the_donor(batches: int) -> None:
    ahead = evolve(5, evolve(5))
    assert ahead == [6, 6, 5, 12.0, 9.0, 4.0, 5.0, 10, 0.5**5 * 0.125, 8]
    assert evolve(batches, evolve(5)) == ahead


def test_the_globals_of_a_module_beside_the_script_are_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "step = 0\ndef advance():\n    global step\n    step += 1\n    return step\n"
    (tmp_path / "rates_of_a_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module("rates_of_a_test")
    advance, counts = module.advance, OwnCounts()
    for _ in range(3):
        advance()
    counts.begin(reach())
    donor = counts.read().numbers
    module.step = 1
    counts.take(donor, {})
    assert advance() == 4


def generated(rounds: int) -> Iterator[int]:
    for number in range(rounds):
        yield 2 * number


def test_a_generator_that_is_elsewhere_in_its_range_is_reported() -> None:
    def counts_after(steps: int, donor: Counts | None = None) -> Counts:
        numbers, counts = generated(9), OwnCounts()
        for _ in range(steps):
            next(numbers)
        if donor is not None:
            counts.take(donor, {})
        return counts.read().numbers

    donor = counts_after(4)
    counts_after(4, donor)
    with pytest.raises(LeftBehindError, match="the loop over `number` is at 1 here and at 3"):
        counts_after(2, donor)


def two_lines() -> Iterator[int]:
    step = 0
    while True:
        step += 1
        yield step
        yield 0


def test_a_generator_that_waits_at_another_line_is_reported() -> None:
    def counts_after(steps: int, donor: Counts | None = None) -> Counts:
        numbers, counts = two_lines(), OwnCounts()
        for _ in range(steps):
            next(numbers)
        if donor is not None:
            counts.take(donor, {})
        return counts.read().numbers

    donor = counts_after(3)
    assert counts_after(1, donor) == counts_after(0, donor) == donor
    with pytest.raises(LeftBehindError, match=r"the generator two_lines:.* cannot be moved there"):
        counts_after(2, donor)


def counted_from(step: int) -> Iterator[int]:
    while True:
        yield step
        step += 1


def test_a_generator_that_has_begun_on_no_rank_is_left_as_it_is() -> None:
    def first_value(donor: Counts | None = None) -> Any:
        numbers, counts = counted_from(4), OwnCounts()
        if donor is None:
            return counts.read().numbers
        counts.take(donor, {})
        return next(numbers)

    assert first_value(first_value()) == 4


def test_an_iterator_that_is_over_is_left_as_it_is() -> None:
    def counts_after(values: Iterator[int], donor: Counts | None = None) -> Counts:
        next(values, None)
        counts = OwnCounts()
        if donor is not None:
            counts.take(donor, {})
        return counts.read().numbers

    over, fresh = iter([0]), iter([0, 1])
    list(over)
    counts_after(over, counts_after(fresh))
    counts_after(fresh, counts_after(over))
    assert (list(over), list(fresh)) == ([], [])


class Reader(IterableDataset[int]):
    def __init__(self) -> None:
        self.at, self.difficulty = 0, 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(3):
            self.at += 1
            yield self.at


def read_after(samples: int, donor: Counts | None = None) -> Any:
    reader, counts = Reader(), OwnCounts()
    for _ in itertools.islice(reader, samples):
        reader.difficulty += 1
    counts.begin(reach())
    if donor is None:
        return counts.read().numbers
    counts.take(donor, {})
    return reader.at, reader.difficulty


def test_a_dataset_keeps_what_it_counts_by_itself() -> None:
    assert read_after(1, read_after(3)) == (1, 3)


def test_between_passes_only_settled_sums_are_taken() -> None:
    def counts(**sums: float) -> Counts:
        return [["function 0 main:1", {"step": 9}, sums, {}]]

    before = counts(loss=0.5, temperature=1.0, fixed=7.0)
    after = counts(loss=4.5, temperature=0.5, fixed=7.0)
    now = counts(loss=1.0, temperature=0.5, fixed=7.0, correct=3.0)
    assert settled(now, before, after) == counts(temperature=0.5)
    assert settled(now, [], []) == counts()
