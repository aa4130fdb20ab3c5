"""A rank that joins takes over what the script counts by itself."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paceline.train.script.own_counts import Counts, OwnCounts, counting_in
from paceline.train.script.reach import reach
from paceline.worker.script_engine import LeftBehindError

SOURCE = """
steps = 0
for epoch in range(3):
    for i in trange(10):
        steps += 1
        self.updates = self.updates + 1
        state["seen"] -= 1
    for mine in range(rank, 10, size):
        total += loss
        size = size * 2
        other = steps + 1
seed = args.seed + args.rank
seed += 1
self.place = local_rank * 10
self.place += 1
"""


def test_a_count_is_what_the_source_increases_by_a_constant(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    found = counting_in(str(script))
    assert (found.names, found.attributes, found.keys) == ({"steps"}, {"updates"}, {"seen"})
    assert found.loops == [("epoch", 4, 11), ("i", 5, 7)]


@pytest.mark.parametrize(
    "text",
    [
        "if loss < best: best = loss",
        "best = min(best, loss)",
        "is_best, best = loss < best, min(loss, best)",
        "best = loss if loss < best else best",
        "if best is None or loss > best + delta:\n    best, epoch = loss, 1",
        "if loss < best - delta:\n    pass\nelse:\n    wait, best = 0, loss",
    ],
)
def test_a_best_value_is_recognized(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert counting_in(str(script)).names == {"best"}


@pytest.mark.parametrize(
    "text",
    [
        "if loss < limit: best = loss",
        "best = min(loss, 1)",
        "if loss == best: best = loss",
        "last = time.monotonic()\nif now - last > 10: last = now",
        "gpu = int(os.environ['LOCAL_RANK'])\ngpu = min(gpu, 7)",
        "gpu = int(os.environ.get('LOCAL_RANK', 0))\ngpu = min(gpu, 7)",
    ],
)
def test_other_assignments_keep_no_best_value(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert counting_in(str(script)).names == set()


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
        return json.loads(json.dumps(counts.read()))
    counts.take(donor)
    return best, state["best"], patience.best


def test_best_values_become_those_of_the_donor() -> None:
    assert search(OwnCounts(), [], search(OwnCounts(), [3.0, 1.5, 2.0])) == (1.5, 3.0, 1.5)
    assert search(OwnCounts(), [2.0], search(OwnCounts(), [])) == (float("inf"), -1.0, None)


@pytest.mark.parametrize("text", [None, "for x in", "\0"])
def test_a_source_that_cannot_be_read_counts_nothing(tmp_path: Path, text: str | None) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert counting_in(str(script)).names == set()


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
    args, found = Namespace(updates=0, slot=steps), Counter[str]()
    while step < steps:
        schedule.step()
        state["seen"] += 1
        args.updates += 1
        found["seen"] += 1
        step += 1
    counts.begin(reach())
    if donor is None:
        return counts.read()
    counts.take(donor)
    of_schedule = schedule.updates, schedule.state.updates, schedule.log["seen"]
    return step, of_schedule, state, vars(args), found["seen"], rank


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
            return counts.read()
        if step == at and donor is not None:
            counts.take(donor)
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
            return counts.read()
        counts.take(donor)
    return []


def test_a_loop_that_shares_numbers_between_ranks_may_be_elsewhere() -> None:
    in_a_shared_loop(1, in_a_shared_loop(0))
