"""The text that a script prints when an error ends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from paceline.core.messages import ScriptError
from paceline.errors import RuntimeBrokenError, UsageError
from paceline.train.contribution import ContributionBuilder
from paceline.train.mistakes import explain_errors, script_error
from paceline.train.refusals import check_optimizer
from paceline_api.errors import EXIT_BAD_INPUT
from torch._C._distributed_c10d import HashStore


@pytest.fixture
def end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[], object]], tuple[int, str, list[str]]]:
    """Return a function that runs a script: exit code, stderr, and what its agent was told."""
    reported: list[str] = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    explain_errors(lambda why, _: reported.append(why))

    def run(script: Callable[[], object]) -> tuple[int, str, list[str]]:
        code = 1
        try:
            script()
        except Exception as error:
            try:
                sys.excepthook(type(error), error, error.__traceback__)
            except SystemExit as wanted:
                code = int(str(wanted.code))
        return code, capsys.readouterr().err, reported

    return run


def test_a_usage_error_is_shown_with_its_line_and_hint_but_no_traceback(end: Any) -> None:
    code, shown, reported = end(lambda: check_optimizer(3))
    assert code == 2
    assert shown.startswith("error: DistributedOptimizer got a int, not a torch optimizer (")
    assert f"{__file__}, line " in shown
    assert "\nhint: pass the optimizer first" in shown
    assert "Traceback" not in shown
    assert [f"error: {text}\n" for text in reported] == [shown]


def test_the_traceback_of_a_foreign_error_omits_our_frames(end: Any) -> None:
    class Session:
        stopped = False

        def holds(self, lease: int) -> bool:
            raise KeyError(f"no lease {lease}")

    class Batch:
        first, lease = True, 7

    builder = ContributionBuilder(Session(), None, mean=True)  # type: ignore[arg-type]
    code, shown, reported = end(lambda: builder.accepts(Batch()))  # type: ignore[arg-type]
    assert code == 1
    assert shown.startswith("Traceback")
    assert "in holds" in shown
    assert "contribution.py" not in shown
    assert reported[0].startswith(f"KeyError: 'no lease 7' ({__file__}, line ")


def test_next_of_an_empty_loader_gets_a_hint(end: Any) -> None:
    code, shown, reported = end(lambda: next(iter([])))
    assert code == 1
    assert "\nhint: next(iter(loader)) finds no batch" in shown
    assert "next(iter(loader), None)" in reported[0]


def test_an_internal_error_is_shown_with_its_traceback(end: Any) -> None:
    def broken() -> None:
        raise RuntimeBrokenError("a thread has ended", hint="report it")

    code, shown, reported = end(broken)
    assert code == 70
    assert shown.startswith("Traceback")
    assert reported == []


def test_an_error_of_a_loader_worker_has_the_workers_line() -> None:
    """Parse the text that torch raises in the loop over the loader."""
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        'last):\n  File "/venv/lib/python3.11/site-packages/torch/utils/fetch.py", line 54, in '
        'fetch\n    data = [self.dataset[i]]\n  File "/job/data.py", line 12, in __getitem__\n'
        "    raise KeyError('label')\nKeyError: 'label'\n"
    )

    class Keyed(KeyError):
        __str__ = Exception.__str__

    Keyed.__name__ = "KeyError"
    raised = script_error(Keyed(text), None)
    assert raised == ScriptError("KeyError", "'label'", "/job/data.py", 12)


def test_only_the_first_line_of_an_exception_is_reported() -> None:
    try:
        raise ValueError("cannot read\nall of it")
    except ValueError as error:
        raised = script_error(error, error.__traceback__)
    assert (raised.type, raised.message, raised.file) == ("ValueError", "cannot read", __file__)
    assert str(raised) == f"ValueError: cannot read ({__file__}, line {raised.line})"


def test_an_error_of_paceline_is_shown_although_torch_wraps_the_hook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    explain_errors(lambda *_: None)
    before = sys.excepthook
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert sys.excepthook is not before, "torch has installed its own"
        with pytest.raises(UsageError) as refusal:
            check_optimizer(3)
        with pytest.raises(SystemExit) as ends:
            sys.excepthook(UsageError, refusal.value, refusal.tb)
    finally:
        dist.destroy_process_group()
    assert ends.value.code == EXIT_BAD_INPUT
    shown = capsys.readouterr().err
    assert shown.startswith("error: DistributedOptimizer got a int, not a torch optimizer (")
    assert "\nhint: pass the optimizer first" in shown


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_keyboard_interrupt_is_the_script_s_own_only_if_a_statement_raises_it(
    monkeypatch: pytest.MonkeyPatch, *, by_signal: bool
) -> None:
    raised: list[ScriptError | None] = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    explain_errors(lambda _, error: raised.append(error))
    try:
        if by_signal:
            signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt("enough")
    except KeyboardInterrupt as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert [(error.type, error.file) for error in raised if error is not None] == (
        [] if by_signal else [("KeyboardInterrupt", __file__)]
    )
