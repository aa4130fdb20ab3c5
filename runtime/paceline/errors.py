"""The errors that a training script can meet.

Each says what is wrong, where, and what to do about it.

    PacelineError (paceline_api.errors)    a mistake or condition that a user can act on
    |-- UsageError                         the script uses Paceline in a way that cannot work
    |   |-- UnsupportedError               a feature of torch that Paceline refuses by name
    |   |-- ChangedLaterError              a change of something that is fixed during training
    |   `-- DataError                      the data set, or a request to the loader
    |-- RuntimeBrokenError                 a fault of Paceline itself
    |-- ReplayError                        a recorded run cannot be run again
    |-- StateError                         a state from another rank does not fit this script
    |-- CheckpointError                    a checkpoint is damaged or belongs to another job
    `-- JobStoppedError                    the script goes on stepping after the job's end (D7)
    SystemExit
    `-- DismissedError                     this rank is not a member of the job any more (D7)
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
    """Raised if the script uses Paceline in a way that cannot work."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint, exit_code=EXIT_BAD_INPUT)

    def __str__(self) -> str:
        # A script's traceback prints only this, so the hint belongs into it.
        return f"{self.message}\nhint: {self.hint}"


class UnsupportedError(UsageError):
    """Raised for a feature of torch that Paceline refuses by name."""


class ChangedLaterError(UsageError):
    """Raised if the script changes something that is fixed once training has started."""


class DataError(UsageError):
    """Raised if the data set, or what the loader is asked to do with it, cannot work."""


class ReplayError(PacelineError):
    """Raised if a recorded run cannot be run again, or if its record is incomplete."""

    def __str__(self) -> str:
        # A script's traceback prints only this.
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class StateError(PacelineError):
    """Raised if a state from another rank belongs to another model or optimizer."""


class CheckpointError(PacelineError):
    """Raised for a checkpoint that is damaged, or of another job, model or data set."""

    def __str__(self) -> str:
        # It reaches the user through the coordinator as one text.
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class JobStoppedError(PacelineError):
    """Raised if the script goes on stepping after the job is over (D7)."""


class RuntimeBrokenError(PacelineError):
    """Raised for a fault of Paceline itself: one of its threads has ended (exit code 70)."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint, exit_code=EXIT_BROKEN)


class DismissedError(SystemExit):
    """Ends a rank that is not a member of the job any more. It publishes nothing (D7)."""
