"""The base of all errors that a user sees, and the errors about a job file.

Such an error says what was wrong, where, and what to do; it prints as two lines and never as a
traceback. The runtime derives its own errors from `PacelineError` and uses other exit codes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

EXIT_FAILURE: Final = 1
EXIT_BAD_INPUT: Final = 2
_VALUE_CHARS_MAX: Final = 60


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
"""The value of a `SpecError` about a field that is not there."""


class PacelineError(Exception):
    """A mistake or a condition that a user can understand and act on."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        if hint:
            self.add_note(f"hint: {hint}")  # where Python itself shows it, as in a notebook
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def render(self) -> str:
        """The text for a terminal: `error: ...` and, if there is one, `hint: ...`."""
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return printable_lines(f"error: {self.message}{hint}")


class JobFileError(PacelineError):
    """A file as a whole is no job: unreadable, no YAML, empty, two documents; or one that Paceline
    itself has written is of another release."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=EXIT_BAD_INPUT)


class SpecError(PacelineError):
    """One field of a job is wrong."""

    def __init__(
        self, path: str, value: object, problem: str, *, hint: str, where: str = ""
    ) -> None:
        """`where`: the place in the file, such as `job.yaml, line 14`; empty if not known."""
        self.path = path
        self.value = value
        self.problem = problem
        self.where = where
        shown = "" if value is MISSING else f"{show_value(value)} "
        place = f" ({where})" if where else ""
        message = printable(f"{path}: {shown}{problem}{place}")
        super().__init__(message, hint=printable(hint), exit_code=EXIT_BAD_INPUT)

    def at(self, where: str) -> SpecError:
        """The same error with its place in the file."""
        return SpecError(self.path, self.value, self.problem, hint=self.hint, where=where)


class InvalidJobError(PacelineError):
    """Everything that is wrong with one job, so that it is mended in one go."""

    def __init__(self, errors: Iterable[SpecError]) -> None:
        self.errors = tuple(errors)
        assert self.errors, "an invalid job without an error"
        super().__init__(
            "; ".join(error.message for error in self.errors),
            hint=self.errors[0].hint,
            exit_code=EXIT_BAD_INPUT,
        )

    def render(self) -> str:
        return "\n".join(error.render() for error in self.errors)


def show_value(value: object) -> str:
    """A value as the user wrote it, on one line and not too long."""
    text = printable(_show(value))
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[: _VALUE_CHARS_MAX - 3]}..."


def printable(text: str) -> str:
    """`text` on one line; a control character from a file must not reach the terminal as it is."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return text of somebody else as a terminal or a log may show it: what has no shape of its own
    (escapes, other control characters, marks that turn the direction of reading, halves of
    surrogate pairs) is written out, such as \\x1b. Ends of lines, tabs and spaces stay."""
    if text.isprintable():
        return text
    return "".join(c if is_visible(c) else c.encode("unicode_escape").decode() for c in text)


def is_visible(char: str) -> bool:
    """Return True if a terminal shows the character as one, or as white space."""
    return char.isprintable() or char in "\n\t" or unicodedata.category(char) == "Zs"


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if value else "an empty text"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence):
        return "a list"
    return str(value)
