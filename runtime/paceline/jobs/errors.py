"""Errors of the job operations; each one states in one sentence what is wrong and what to do.

    PacelineError (paceline_api.errors)
    `-- JobsError
        |-- NoSuchJobError      no job has that name
        |-- NoSuchRuntimeError  no runtime has that name
        |-- AmbiguousJobError   several runs on this machine have that name
        |-- NoSuchRankError     the rank number is beyond the job's ranks
        |-- NoSamplesError      no samples of the job's last steps are available
        |-- NameTakenError      a job with that name exists already
        |-- RejectedError       the API server, or a run, rejects the job or the change
        |-- NotAllowedError     the user's permissions do not suffice (403)
        |-- NotInstalledError   the cluster has no TrainingJobs, or those of another release
        |-- MissingExtraError   an optional package (kubernetes, pandas) is not installed
        |-- AwayError           the API server, or a run, does not answer
        |-- UnreadableRunError  a file of a run on this machine cannot be read
        `-- WaitTimeoutError    `wait()`, or the wait of `delete()`, timed out

Every error carries a hint. The exit code is 2, but 1 for AwayError and 3 for WaitTimeoutError.
"""

from __future__ import annotations

from typing import ClassVar, Final

from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, PacelineError, printable

EXIT_TIMEOUT: Final = 3


class JobsError(PacelineError):
    """Base class of the errors about a job, or about the place where it runs."""

    code: ClassVar[int] = EXIT_BAD_INPUT

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=self.code)


class NoSuchJobError(JobsError):
    """Raised when no job has the given name, or the job was deleted meanwhile."""


class NoSuchRuntimeError(JobsError):
    """Raised when a cluster has no runtime of the given kind and name."""


class AmbiguousJobError(JobsError):
    """Raised when several runs on this machine have the given name."""

    def __init__(self, name: str, folders: tuple[str, ...]) -> None:
        super().__init__(
            f"{len(folders)} jobs with the name {name} are running: {', '.join(folders)}",
            hint="name the run folder instead",
        )
        self.folders = folders


class NoSuchRankError(JobsError):
    """Raised when the job has fewer ranks than the given rank number requires."""


class NoSamplesError(JobsError):
    """Raised when no samples of a job's last steps are available."""


class NameTakenError(JobsError):
    """Raised when a job with the given name exists already."""


class RejectedError(JobsError):
    """Raised when the API server, or a run, rejects the job or the change."""


class NotAllowedError(JobsError):
    """Raised when the user's permissions do not suffice (HTTP status 403)."""


class NotInstalledError(JobsError):
    """Raised when the cluster has no TrainingJobs, or those of another release."""


class MissingExtraError(JobsError):
    """Raised when an optional package, such as `kubernetes` or `pandas`, is missing."""


class AwayError(JobsError):
    """Raised when the API server, or a run, does not answer."""

    code = EXIT_FAILURE


class UnreadableRunError(JobsError):
    """Raised when a file of a run on this machine cannot be read."""


class WaitTimeoutError(JobsError):
    """Raised when a wait for a job's state, or for its removal, times out."""

    code = EXIT_TIMEOUT
