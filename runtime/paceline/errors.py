"""The errors that a training script can meet. Each says what, where and what to do about it.

PacelineError (paceline_api.errors)      a mistake or condition that a user can act on
|-- UsageError                           the script uses Paceline in a way that cannot work
|   |-- UnsupportedError                 a feature of torch that Paceline refuses, by its name
|   `-- ChangedLaterError                something was changed that is fixed once training starts
|-- DataError                            the data set, or what the loader is asked to do with it
|-- RuntimeBrokenError                   a fault of Paceline itself
|-- ReplayError                          a recorded run cannot be run again
|-- StateError                           a state from another rank does not fit this script
|-- CheckpointError                      a checkpoint is damaged or of another job
`-- JobStoppedError                      the job is over and the script goes on stepping (D7)
SystemExit
`-- DismissedError                       this rank is no part of the job any more (D7)
"""

from __future__ import annotations

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

EXIT_BROKEN = 70

__all__ = [
    "ChangedLaterError",
    "CheckpointError",
    "DataError",
    "DismissedError",
    "JobStoppedError",
    "PacelineError",
    "ReplayError",
    "RuntimeBrokenError",
    "StateError",
    "UnsupportedError",
    "UsageError",
]


class UsageError(PacelineError):
    """The script uses Paceline in a way that cannot work."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint, exit_code=EXIT_BAD_INPUT)

    def __str__(self) -> str:
        # A script's traceback prints only this; the way out belongs into it.
        return f"{self.message}\nhint: {self.hint}"


class UnsupportedError(UsageError):
    """A feature of torch that Paceline refuses, by its name."""


class ChangedLaterError(UsageError):
    """Something was changed that is fixed once training has started."""


class DataError(UsageError):
    """The data set, or what the loader is asked to do with it."""


class ReplayError(PacelineError):
    """A recorded run cannot be run again: by its nature, or because its record is not whole."""

    def __str__(self) -> str:
        # A script's traceback prints only this.
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class StateError(PacelineError):
    """A state from another rank does not fit this script: another model or another optimizer."""


class CheckpointError(PacelineError):
    """A checkpoint is damaged, or of another job, model or data set."""

    def __str__(self) -> str:
        # It reaches the user through the coordinator, as one text.
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class JobStoppedError(PacelineError):
    """The job is over and the script goes on stepping (D7)."""


class RuntimeBrokenError(PacelineError):
    """A fault of Paceline itself: one of its threads has ended (exit code 70)."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint, exit_code=EXIT_BROKEN)


class DismissedError(SystemExit):
    """This rank is no part of the job any more; it ends without publishing anything (D7)."""
