"""The text with which a script ends that met an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from paceline.errors import RuntimeBrokenError
from paceline.train.contribution import ContributionBuilder
from paceline.train.mistakes import explain_errors
from paceline.train.refusals import check_optimizer


@pytest.fixture
def end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[], object]], tuple[int, str, list[str]]]:
    """What ends a script: exit code, stderr, and what its agent is told."""
    told: list[str] = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    explain_errors(told.append)

    def run(script: Callable[[], object]) -> tuple[int, str, list[str]]:
        code = 1
        try:
            script()
        except Exception as error:
            try:
                sys.excepthook(type(error), error, error.__traceback__)
            except SystemExit as wanted:
                code = int(str(wanted.code))
        return code, capsys.readouterr().err, told

    return run


def test_a_mistake_in_the_script(end: Any) -> None:
    code, shown, told = end(lambda: check_optimizer(3, "DistributedOptimizer"))
    assert code == 2
    assert shown.startswith("error: DistributedOptimizer got a int, not a torch optimizer (")
    assert f"{__file__}, line " in shown
    assert "\nhint: pass the optimizer first" in shown
    assert "Traceback" not in shown
    assert [f"error: {text}\n" for text in told] == [shown]


def test_an_error_that_passed_through(end: Any) -> None:
    class Session:
        stopped = False

        def holds(self, lease: int) -> bool:
            raise KeyError(f"no lease {lease}")

    class Batch:
        first, lease = True, 7

    builder = ContributionBuilder(Session(), None, mean=True)  # type: ignore[arg-type]
    code, shown, told = end(lambda: builder.accepts(Batch()))  # type: ignore[arg-type]
    assert code == 1
    assert shown.startswith("Traceback")
    assert "in holds" in shown
    assert "contribution.py" not in shown
    assert told[0].startswith(f"KeyError: 'no lease 7' ({__file__}, line ")


def test_a_look_at_a_batch_where_there_is_none(end: Any) -> None:
    code, shown, told = end(lambda: next(iter([])))
    assert code == 1
    assert "\nhint: next(iter(loader)) finds no batch" in shown
    assert "next(iter(loader), None)" in told[0]


def test_a_fault_of_our_own_is_shown_as_it_is(end: Any) -> None:
    def broken() -> None:
        raise RuntimeBrokenError("a thread has ended", hint="report it")

    code, shown, told = end(broken)
    assert code == 70
    assert shown.startswith("Traceback")
    assert told == []
