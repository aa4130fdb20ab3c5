"""What the SDK adds to the errors of `paceline.jobs.errors` and `paceline.function.errors`."""

from __future__ import annotations

from paceline_api.errors import PacelineError, printable

from paceline.jobs.interface import JobStatus


class EndUnknownError(PacelineError):
    """The job that was waited for has ended, and what it left does not say how."""

    def __init__(self, status: JobStatus) -> None:
        self.status = status
        message = f"job {status.name} has ended: {status.message}"
        super().__init__(message, hint=printable(status.hint))


class JobFailedError(PacelineError):
    """The job that was waited for has failed."""

    def __init__(self, status: JobStatus) -> None:
        self.status = status
        message = f"job {status.name} has failed: {status.message}"
        super().__init__(message, hint=printable(status.hint or "job.logs() has its last words"))
