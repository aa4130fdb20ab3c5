"""Errors about a function that a job shall run; each message says in one sentence what to do."""

from __future__ import annotations

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, printable


class FunctionError(PacelineError):
    """Raised when a function cannot be sent to the ranks that shall run it."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=EXIT_BAD_INPUT)


class ArgumentError(FunctionError):
    """Raised when an argument cannot be sent, or when the function has no such argument."""
