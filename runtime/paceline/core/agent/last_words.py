"""Parser for the exception at the end of a process's stderr.

A script that has called `pl.init()` reports its exception itself. A script that fails earlier
leaves only its traceback, of which the agent keeps the last lines. So does one that crashes, if
Python's fault handler is enabled, as `paceline launch` does.
"""

from __future__ import annotations

import re
from typing import Final

from paceline.core.messages import ScriptError

_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)')
_CRASH: Final = re.compile(r"^Fatal Python error: ", re.M)
_ENDS: Final = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_NOT_THE_SCRIPTS: Final = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3[^/]*/")


def error_in(stderr: str) -> ScriptError | None:
    """Return the exception of the traceback in a text.

    Args:
        stderr: The last lines that the process wrote to stderr.

    Returns:
        The exception, at the innermost line that belongs to the script. Lines of installed packages
        and of the standard library count only if there is no other. None if the text holds no
        traceback.
    """
    lines = stderr.splitlines()
    frames = [match for match in map(_FRAME.match, lines) if match]
    if not frames:
        return None
    after = lines[max(n for n, line in enumerate(lines) if _FRAME.match(line)) + 1 :]
    ends = next((match for match in map(_ENDS.match, after) if match), None)
    if ends is None:
        return None
    own = [frame for frame in frames if not _NOT_THE_SCRIPTS.search(frame["file"])]
    at = (own or frames)[-1]
    return ScriptError(ends["type"], (ends["message"] or "").strip(), at["file"], int(at["line"]))


def crash_in(stderr: str, signal: str) -> ScriptError | None:
    """Return the place of a crash that Python's fault handler has written.

    Args:
        stderr: The last lines that the process wrote to stderr.
        signal: The signal that ended it, for people.

    Returns:
        The signal, at the innermost line that belongs to the script. None if the text does not say
        where the crash was, or no line of the script ran.
    """
    crash = _CRASH.search(stderr)
    if crash is None:
        return None
    # The innermost frame comes first.
    frames = [match for match in map(_FRAME.match, stderr[crash.end() :].splitlines()) if match]
    own = next((frame for frame in frames if not _NOT_THE_SCRIPTS.search(frame["file"])), None)
    return own and ScriptError(signal, "", own["file"], int(own["line"]))
