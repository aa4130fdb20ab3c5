"""Base class of all errors that users see, and the errors about a job file.

Such an error says what is wrong, where, and what to do. It is printed as two lines, and never as a
traceback. The runtime derives its own errors from `PacelineError` and uses further exit codes.
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
"""Value of a `SpecError` about a field that is missing."""


class PacelineError(Exception):
    """Base class of errors that a user can understand and act on."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        if hint:
            self.add_note(f"hint: {hint}")  # shown in a traceback, as in a notebook
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def render(self) -> str:
        """Return the text for a terminal: `error: ...` and, if any, `hint: ...`."""
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return printable_lines(f"error: {self.message}{hint}")


class JobFileError(PacelineError):
    """Raised when a file as a whole is not a job.

    It is unreadable, not YAML, empty, or has two documents; or Paceline itself has written it, in
    another release.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=EXIT_BAD_INPUT)


class SpecError(PacelineError):
    """Raised when one field of a job is wrong."""

    def __init__(
        self, path: str, value: object, problem: str, *, hint: str, where: str = ""
    ) -> None:
        """Create an error about one field.

        Args:
            path: The field, such as `spec.replicas`.
            value: Its value; MISSING if it has none.
            problem: What is wrong; it continues the sentence that begins with path and value.
            hint: What to do.
            where: The place in the file, such as `job.yaml, line 14`; empty if unknown.
        """
        self.path = path
        self.value = value
        self.problem = problem
        self.where = where
        shown = "" if value is MISSING else f"{show_value(value)} "
        place = f" ({where})" if where else ""
        message = printable(f"{path}: {shown}{problem}{place}")
        super().__init__(message, hint=printable(hint), exit_code=EXIT_BAD_INPUT)

    def at(self, where: str) -> SpecError:
        """Return the same error with its place in the file."""
        return SpecError(self.path, self.value, self.problem, hint=self.hint, where=where)


class InvalidJobError(PacelineError):
    """Raised with all errors of one job, so that a user can fix them together."""

    def __init__(self, errors: Iterable[SpecError]) -> None:
        self.errors = tuple(errors)
        assert self.errors, "an invalid job without an error"
        super().__init__(
            "; ".join(error.message for error in self.errors),
            hint=self.errors[0].hint,
            exit_code=EXIT_BAD_INPUT,
        )

    def render(self) -> str:
        """Return the texts of all errors, one below the other."""
        return "\n".join(error.render() for error in self.errors)


def show_value(value: object) -> str:
    """Return a value as the user wrote it, on one line and shortened."""
    text = printable(_show(value))
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[: _VALUE_CHARS_MAX - 3]}..."


def printable(text: str) -> str:
    """Return text on one line, with control characters escaped for a terminal or a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return untrusted text in a form that a terminal or a log may show.

    Characters without a shape of their own are escaped, such as ESC as "x1b" after a backslash:
    control characters, marks that change the direction of writing, and halves of surrogate pairs.
    Line ends, tabs and spaces are kept.

    Args:
        text: The text.

    Returns:
        The text with escapes.
    """
    if text.isprintable():
        return text
    return "".join(c if is_visible(c) else c.encode("unicode_escape").decode() for c in text)


def is_visible(char: str) -> bool:
    """Return True if a terminal shows the character as itself or as white space."""
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
