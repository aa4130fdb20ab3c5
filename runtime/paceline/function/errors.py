"""What can be wrong with a function that shall train: each says in one sentence what to do."""

from __future__ import annotations

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, printable


class FunctionError(PacelineError):
    """The function cannot be sent to where it shall run."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=EXIT_BAD_INPUT)


class ArgumentError(FunctionError):
    """An argument of it cannot be sent, or is none of its own."""
