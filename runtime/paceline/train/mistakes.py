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
from types import TracebackType
from typing import Final

from paceline.core.agent.last_words import error_in
from paceline.core.messages import ScriptError
from paceline.errors import PacelineError, RuntimeBrokenError
from paceline.worker.script_frames import innermost, is_own

LINES: Final = 15
"""Of a traceback that are passed on; all of it is in the log."""

HEADLINE_MAX: Final = 300
"""Characters of an exception's first line."""
NO_BATCH: Final = (
    "next(iter(loader)) finds no batch where this rank has none left in the epoch: it came late, "
    "or others took the rest. Write next(iter(loader), None), or ask the data set"
)

Tell = Callable[[str, ScriptError | None], None]
"""With what the agent is told: a text for people, and the exception if it is the script's own."""


def explain_errors(tell: Tell) -> Callable[[], None]:
    """Have this process explain the error that ends it; `tell` passes the reason on.

    An error that is none of Paceline's is shown by the script's own `sys.excepthook`, if it has
    set one.

    Returns:
        What gives the hook from before back, unless the script has set another one since.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if isinstance(error, RuntimeBrokenError):
            traceback.print_exception(kind, error, at)
        elif isinstance(error, PacelineError):
            text = explain(error, at)
            tell(text, None)
            sys.stderr.write(f"error: {text}\n")
        else:
            text = without_own_frames(kind, error, at)
            if isinstance(error, StopIteration):
                text += f"hint: {NO_BATCH}\n"
            if issubclass(kind, Exception):
                last = "".join(text.splitlines(keepends=True)[-LINES:]).rstrip()
                raised = script_error(error, at)
                tell(f"{raised}; last lines:\n{last}", raised)
            if before is sys.__excepthook__:
                sys.stderr.write(text)
            else:
                before(kind, error, at)
        sys.stderr.flush()
        if isinstance(error, PacelineError):
            sys.exit(error.exit_code)  # the interpreter takes its code from here

    def end() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return end


def explain(error: PacelineError, at: TracebackType | None) -> str:
    """What, where in the script, and the hint."""
    return f"{error.message}{_where(at)}" + (f"\nhint: {error.hint}" if error.hint else "")


def script_error(error: BaseException, at: TracebackType | None) -> ScriptError:
    """Return what was raised, and the innermost line of the script that was under way.

    What a worker of torch's loader has raised comes as text: its own line counts, not that of the
    loop over the loader."""
    kind, text = type(error).__name__, str(error)
    if text.startswith(f"Caught {kind} in ") and (inner := error_in(text)) is not None:
        return inner
    first = next(iter(text.splitlines()), "")
    file, line = _place(at)
    return ScriptError(kind, first[:HEADLINE_MAX], file, line)


def without_own_frames(
    kind: type[BaseException], error: BaseException, at: TracebackType | None
) -> str:
    """The traceback as the script's author knows it."""
    shown = traceback.TracebackException(kind, error, at)
    for each in _chain(shown):
        if each.stack and not is_own(each.stack[-1].filename):
            kept = [frame for frame in each.stack if not is_own(frame.filename)]
            each.stack = traceback.StackSummary.from_list(kept)
    return "".join(shown.format())


def _chain(
    shown: traceback.TracebackException | None,
) -> Iterable[traceback.TracebackException]:
    while shown is not None:
        yield shown
        shown = shown.__cause__ or shown.__context__


def _where(at: TracebackType | None) -> str:
    file, line = _place(at)
    return f" ({file}, line {line})" if file else ""


def _place(at: TracebackType | None) -> tuple[str, int]:
    """The last line of the script, or of a module beside it, that was under way."""
    return innermost(traceback.extract_tb(at))
