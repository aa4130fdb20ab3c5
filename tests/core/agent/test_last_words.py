"""The exception that a process left on stderr."""

from __future__ import annotations

import pytest
from paceline.core.agent.last_words import crash_in, error_in
from paceline.core.messages import ScriptError

HEAD = "Traceback (most recent call last):\n"
LIBRARY = '  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads\n    return x\n'


CASES: dict[str, ScriptError | None] = {
    f'{HEAD}  File "train.py", line 4, in <module>\n    raise E(1)\nImportError: no such lib': (
        ScriptError("ImportError", "no such lib", "train.py", 4)
    ),
    f'{HEAD}  File "/a/train.py", line 9, in f\n{LIBRARY}json.decoder.JSONDecodeError: Expecting': (
        ScriptError("json.decoder.JSONDecodeError", "Expecting", "/a/train.py", 9)
    ),
    "  File \"train.py\", line 2, in <module>\n    x = (\n        ^\nSyntaxError: '(' is open": (
        ScriptError("SyntaxError", "'(' is open", "train.py", 2)
    ),
    '  File "a.py", line 1, in g\nKeyError: 1\n\nDuring handling of the above exception, another '
    'exception occurred:\n\n  File "a.py", line 5, in f\nMyError': (
        ScriptError("MyError", "", "a.py", 5)
    ),
    "Killed": None,
    "cannot open shard: exit": None,
    "": None,
}


@pytest.mark.parametrize(("text", "error"), CASES.items())
def test_the_last_exception_is_reported_at_the_line_of_the_script(
    text: str, error: ScriptError | None
) -> None:
    assert error_in(text) == error


CRASHES: dict[str, tuple[str, int] | None] = {
    "Fatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call first):\n"
    '  File "/x/site-packages/torch/a.py", line 2 in g\n  File "/job/train.py", line 7 in f\n'
    '  File "/job/train.py", line 9 in <module>\n\nExtension modules: torch._C (total: 1)': (
        "/job/train.py",
        7,
    ),
    "warning\nFatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call "
    'first):\n  File "train.py", line 3 in <module>': ("train.py", 3),
    "Fatal Python error: Aborted\n\n<no Python frame>": None,
    'terminate called\n  File "train.py", line 3 in <module>': None,
    "": None,
}


@pytest.mark.parametrize(("text", "place"), CRASHES.items())
def test_a_crash_is_reported_at_the_innermost_line_of_the_script(
    text: str, place: tuple[str, int] | None
) -> None:
    error = crash_in(text, "signal 6 (SIGABRT)")
    assert (error and (error.file, error.line)) == place
    assert error is None or str(error).startswith("signal 6 (SIGABRT) (")
