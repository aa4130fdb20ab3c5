"""Count the steps of a piece of the protocol, instead of timing it.

A step is a line of `paceline.core` that runs, which covers each turn of a loop, or a comparison of
two members, which covers a scan of a tuple that runs no line. A busy machine changes no count.
Releases of Python differ a little, so a test compares counts at several sizes and leaves a margin
above an absolute bound.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import paceline.core as package
import pytest
from paceline_api.ids import MemberId

CORE = str(Path(package.__file__).parent)


def count_steps(work: Callable[[], object]) -> int:
    """Return the number of steps that `work` makes on this thread."""
    steps = 0

    def line(_: FrameType, event: str, __: object) -> Any:
        nonlocal steps
        steps += event == "line"
        return line

    def call(frame: FrameType, _: str, __: object) -> Any:
        return line if frame.f_code.co_filename.startswith(CORE) else None

    def equal(a: object, b: object) -> bool:
        nonlocal steps
        steps += 1
        return tuple.__eq__(a, b)  # type: ignore[operator]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemberId, "__eq__", equal)
        before = sys.gettrace()
        sys.settrace(call)
        try:
            work()
        finally:
            sys.settrace(before)
    return steps
