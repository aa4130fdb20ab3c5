"""When the operations of a script wait for missing slots, and which results are repeated (S3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paceline.core.protocol.places import Spot
from paceline.core.protocol.records import Operation
from paceline.worker.operations import Operations, Result
from paceline.worker.script_engine import LeftBehindError, ScriptEngine

NUMBER = [torch.zeros(1)]


class Alone(ScriptEngine):
    """Engine whose operations return the given numbers of missing slots, one after the other."""

    def __init__(self, missing: list[int], place: int = 0) -> None:
        self.operations = Operations()
        self.operations.path.here = Spot(place, 0)
        self.needs_all, self.given_up, self._missing = False, 0, 0
        self._answers = iter(missing)
        self.made: list[str] = []
        self.pauses = 0

    def _take_part(self, operation: Operation, *_: Any) -> Result:
        self.made.append(operation.name)
        self.operations.path.made()
        self._missing = next(self._answers)
        return Result([torch.ones(1)], 2, self._missing)

    def pause(self, _: float) -> None:
        self.pauses += 1


def test_a_call_at_a_point_is_made_again_until_all_slots_are_there() -> None:
    engine = Alone([1, 1, 0])
    assert engine.operate_with_all("barrier", NUMBER).missing == 0
    assert engine.made == ["barrier"] * 3
    assert engine.pauses == 2


def steps(engine: Alone, count: int = 2) -> None:
    for _ in range(count):
        engine.wait_for_missing("")
        engine.operate("backward", NUMBER, samples=4)


def test_a_step_goes_on_without_missing_slots() -> None:
    engine = Alone([1, 1], place=1)
    steps(engine)
    assert engine.made == ["backward"] * 2


def test_a_step_of_a_script_that_gathers_in_its_pass_waits_before_it_averages() -> None:
    engine = Alone([1, 1, 0, 0], place=1)
    engine.needs_all = True
    steps(engine)
    assert engine.made == ["backward", "wait for ranks", "wait for ranks", "backward"]


def test_a_call_at_which_nobody_can_join_does_not_wait() -> None:
    engine = Alone([1, 1], place=1)
    engine.needs_all = True
    for _ in range(2):
        engine.operate_with_all("gather", NUMBER, opens=False)
    assert engine.made == ["gather"] * 2


def test_a_kept_result_is_repeated_for_the_same_call_alone() -> None:
    engine = Alone([])
    path = engine.operations.path
    path.follows, path.kept = True, {Spot(0, 0): Result(NUMBER, 2, 0, "all_reduce(SUM)")}
    with pytest.raises(LeftBehindError, match=r"calls barrier where .* called all_reduce\(SUM\)"):
        engine.operate("barrier", NUMBER)
    assert engine.operate("all_reduce(SUM)", NUMBER).sums is NUMBER
    assert path.here == Spot(0, 1)
