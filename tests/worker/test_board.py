"""The writer of TensorBoard events never delays a round, and counts what it leaves out."""

from __future__ import annotations

import builtins
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from paceline.core.protocol.records import LoggedMetric
from paceline.worker.metrics import board as board_module
from paceline.worker.metrics.board import WAITING_MAX, Board
from paceline_api.errors import PacelineError
from paceline_api.ids import MemberId

ME = MemberId(0, 0, 0)


def figure(value: float, weight: float = 2.0) -> tuple[LoggedMetric, ...]:
    return (LoggedMetric("loss", value * weight, weight),)


class Stuck:
    """A writer whose folder answers only when the test lets it."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.rounds: list[int] = []

    def make(self, *_: Any, **__: Any) -> Stuck:
        self.free.wait(30)
        return self

    def add_scalar(self, _: str, __: float, number: int, **___: float) -> None:
        self.rounds.append(number)

    def close(self) -> None:
        """Do nothing."""


def test_a_stuck_folder_delays_nothing_and_missing_rounds_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, board = Stuck(), Board(tmp_path, ME)
    board._make = stuck.make
    more = 100
    for number in range(WAITING_MAX + more + 1):  # at least one is in the writer's hands
        board.add(number, figure(1.0))
    stuck.free.set()
    with caplog.at_level(logging.WARNING):
        board.close()
    written = len(stuck.rounds)
    assert written in (WAITING_MAX, WAITING_MAX + 1)
    assert f"figures of {WAITING_MAX + more + 1 - written} rounds are missing" in caplog.text


def test_a_folder_that_never_answers_does_not_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "CLOSE_S", 0.2)
    stuck, board = Stuck(), Board(tmp_path, ME)
    board._make = stuck.make
    for number in range(5):
        board.add(number, figure(1.0))
    with caplog.at_level(logging.WARNING):
        board.close()
    assert "figures of 5 rounds are missing" in caplog.text
    stuck.free.set()


def test_a_figure_without_weight_is_not_written(tmp_path: Path) -> None:
    board = Board(tmp_path, ME)
    board.add(1, figure(1.0, weight=0.0))
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PacelineError, match=r"spec\.logging\.tensorBoard needs") as raised:
        Board(tmp_path, ME)
    assert "pip install tensorboard" in raised.value.hint
