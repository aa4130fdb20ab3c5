"""Handling of an error that ends a script: message, line of the script, hint and exit code.

A `PacelineError` is a mistake in the script or a condition outside of it. It is shown without a
traceback through Paceline, with the place in the script. With exit code 2 the agent does not start
the script again. Any other error keeps its traceback, without the frames of Paceline that it only
passed through. A fault of Paceline itself is shown with its full traceback.
"""

from __future__ import annotations

import dis
import io
import sys
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final

from paceline.core.agent.last_words import error_in
from paceline.core.messages import ScriptError
from paceline.errors import PacelineError, RuntimeBrokenError
from paceline.worker.script_frames import innermost, is_frozen, is_own

LINES: Final = 15
"""Number of lines of a traceback that are reported to the agent; all of it is in the log."""

HEADLINE_MAX: Final = 300
"""Upper bound on the characters of an exception's first line."""
NO_BATCH: Final = (
    "next(iter(loader)) finds no batch where this rank has none left in the epoch: it came late, "
    "or others took the rest. Write next(iter(loader), None), or ask the data set"
)
"""Hint for a StopIteration, which `next(iter(loader))` raises on a rank without batches."""

Tell = Callable[[str, ScriptError | None], None]
"""Function that reports an error to the agent: a text for people, and the exception if it is the
script's own."""


def explain_errors(tell: Tell) -> Callable[[], None]:
    """Install a hook that explains the error which ends this process.

    An error that is not Paceline's is shown by the script's own `sys.excepthook` if it has set one.

    Args:
        tell: Reports the reason to the agent.

    Returns:
        A function that restores the hook from before, unless the script has set another one since.
    """
    before = sys.excepthook
    stderr = sys.stderr

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if isinstance(error, RuntimeBrokenError):
            traceback.print_exception(kind, error, at)
        elif isinstance(error, PacelineError):
            text = explain(error, at)
            tell(text, None)
            # The hook that torch installs over this one in init_process_group() puts a StringIO
            # into the place of sys.stderr, and prints it only if this one returns.
            stream = stderr if isinstance(sys.stderr, io.StringIO) else sys.stderr
            stream.write(f"error: {text}\n")
            stream.flush()
        else:
            text = without_own_frames(kind, error, at)
            if isinstance(error, StopIteration):
                text += f"hint: {NO_BATCH}\n"
            if kind is not KeyboardInterrupt or _is_raised(at):
                last = "".join(text.splitlines(keepends=True)[-LINES:]).rstrip()
                raised = script_error(error, at)
                tell(f"{raised}; last lines:\n{last}", raised)
            if before is sys.__excepthook__:
                sys.stderr.write(text)
            else:
                before(kind, error, at)
        sys.stderr.flush()
        if isinstance(error, PacelineError):
            sys.exit(error.exit_code)  # the interpreter uses this exit code

    def end() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return end


def explain(error: PacelineError, at: TracebackType | None) -> str:
    """Return the message of an error, the place in the script, and the hint."""
    return f"{error.message}{_where(at)}" + (f"\nhint: {error.hint}" if error.hint else "")


def script_error(error: BaseException, at: TracebackType | None) -> ScriptError:
    """Return what was raised, and the innermost line of the script that was running.

    An error in a worker of torch's loader arrives as text. Then the line in the worker counts, not
    that of the loop over the loader.

    Returns:
        Kind, first line, file and line of the exception.
    """
    kind, text = type(error).__name__, str(error)
    if text.startswith(f"Caught {kind} in ") and (inner := error_in(text)) is not None:
        return inner
    first = next(iter(text.splitlines()), "")
    file, line = _place(at)
    return ScriptError(kind, first[:HEADLINE_MAX], file, line)


def without_own_frames(
    kind: type[BaseException], error: BaseException, at: TracebackType | None
) -> str:
    """Return the traceback without the frames of Paceline, as the script's author knows it.

    The frames by which the interpreter runs a module or a script are left out, too.
    """
    shown = traceback.TracebackException(kind, error, at)
    for each in _chain(shown):
        if each.stack and not is_own(each.stack[-1].filename):
            kept = [
                frame
                for frame in each.stack
                if not is_own(frame.filename) and not is_frozen(frame.filename)
            ]
            each.stack = traceback.StackSummary.from_list(kept)
    return "".join(shown.format())


def _is_raised(at: TracebackType | None) -> bool:
    """Return True if a statement has raised the exception, and False if a signal has (SIGINT)."""
    if at is None:
        return False
    while at.tb_next is not None:
        at = at.tb_next
    return at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]


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
    """Return file and number of the innermost line of the script, or of a module beside it."""
    return innermost(traceback.extract_tb(at))
