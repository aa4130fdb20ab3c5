"""How a script ends that met an error: what, where in the script, what to do; the code for it.

A `PacelineError` is a mistake in the script or a condition outside of it: nobody needs a traceback
through Paceline for it, only the place in the script. With exit code 2 the agent does not start the
script again. Any other error keeps its traceback, less the frames of Paceline that it only passed
through. A fault of Paceline itself is shown as it is.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final

from paceline.errors import PacelineError, RuntimeBrokenError

OWN: Final = str(Path(__file__).resolve().parents[1])

Tell = Callable[[str], None]


def explain_errors(tell: Tell) -> None:
    """From now on the process explains the error that ends it. `tell` passes the reason on."""

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if isinstance(error, RuntimeBrokenError):
            traceback.print_exception(kind, error, at)
        elif isinstance(error, PacelineError):
            text = explain(error, at)
            tell(text)
            sys.stderr.write(f"error: {text}\n")
        else:
            sys.stderr.write(without_own_frames(kind, error, at))
        sys.stderr.flush()
        if isinstance(error, PacelineError):
            sys.exit(error.exit_code)  # the interpreter takes its code from here

    sys.excepthook = hook


def explain(error: PacelineError, at: TracebackType | None) -> str:
    """What, where in the script, and the hint."""
    frames = [f for f in traceback.extract_tb(at) if not _is_own(f.filename)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{error.message}{where}" + (f"\nhint: {error.hint}" if error.hint else "")


def without_own_frames(
    kind: type[BaseException], error: BaseException, at: TracebackType | None
) -> str:
    """The traceback as the script's author knows it."""
    shown = traceback.TracebackException(kind, error, at)
    for each in _chain(shown):
        if each.stack and not _is_own(each.stack[-1].filename):
            kept = [frame for frame in each.stack if not _is_own(frame.filename)]
            each.stack = traceback.StackSummary.from_list(kept)
    return "".join(shown.format())


def _chain(
    shown: traceback.TracebackException | None,
) -> Iterable[traceback.TracebackException]:
    while shown is not None:
        yield shown
        shown = shown.__cause__ or shown.__context__


def _is_own(filename: str) -> bool:
    return filename.startswith(OWN)
