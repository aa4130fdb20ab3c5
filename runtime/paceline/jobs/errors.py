"""What can be wrong with a verb about a job. Each says in one sentence what, and what to do.

PacelineError (paceline_api.errors)
`-- JobsError
    |-- NoSuchJobError      no job of that name
    |-- AmbiguousJobError   several runs of this machine have that name
    |-- NoSuchRankError     a rank beyond the job's
    |-- NoSamplesError      nothing is known of a job's last steps
    |-- NameTakenError      a job of that name is there already
    |-- RejectedError       the API server, or a run, does not take the job or the change
    |-- NotAllowedError     the rights of this user do not reach (403)
    |-- NotInstalledError   the cluster has no TrainingJobs, or those of another release
    |-- MissingExtraError   the package `kubernetes` is not installed
    |-- AwayError           the API server, or a run, does not answer
    |-- UnreadableRunError  a file of a run on this machine cannot be read
    `-- WaitTimeoutError    what was waited for has not come in time
"""

from __future__ import annotations

from typing import ClassVar, Final

from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, PacelineError, printable

EXIT_TIMEOUT: Final = 3


class JobsError(PacelineError):
    """Something about a job, or about the place where it runs."""

    code: ClassVar[int] = EXIT_BAD_INPUT

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=self.code)


class NoSuchJobError(JobsError):
    """There is no job of that name."""


class AmbiguousJobError(JobsError):
    """Several runs of this machine have that name."""

    def __init__(self, name: str, folders: tuple[str, ...]) -> None:
        super().__init__(
            f"{len(folders)} jobs with the name {name} are running: {', '.join(folders)}",
            hint="name the run folder instead",
        )
        self.folders = folders


class NoSuchRankError(JobsError):
    """The job has fewer ranks."""


class NoSamplesError(JobsError):
    """Nothing is known of a job's last steps."""


class NameTakenError(JobsError):
    """A job of that name is there already."""


class RejectedError(JobsError):
    """The API server, or a run, does not take the job or the change."""


class NotAllowedError(JobsError):
    """The rights of this user do not reach (403)."""


class NotInstalledError(JobsError):
    """The cluster has no TrainingJobs, or those of another release."""


class MissingExtraError(JobsError):
    """The package `kubernetes` is not installed."""


class AwayError(JobsError):
    """The API server, or a run, does not answer."""

    code = EXIT_FAILURE


class UnreadableRunError(JobsError):
    """A file of a run on this machine cannot be read."""


class WaitTimeoutError(JobsError):
    """What was waited for has not come in time."""

    code = EXIT_TIMEOUT
