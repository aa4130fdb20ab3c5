"""Errors of the SDK, beside those of `paceline.jobs.errors` and `paceline.function.errors`."""

from __future__ import annotations

from paceline_api.errors import PacelineError, printable

from paceline.jobs.interface import JobStatus


class EndUnknownError(PacelineError):
    """Raised when the job has ended and its files do not say how."""

    def __init__(self, status: JobStatus) -> None:
        self.status = status
        message = f"job {status.name} has ended: {status.message}"
        super().__init__(message, hint=printable(status.hint))


class JobFailedError(PacelineError):
    """Raised when the job that was waited for has failed; `status` has the details."""

    def __init__(self, status: JobStatus) -> None:
        self.status = status
        message = f"job {status.name} has failed: {status.message}"
        super().__init__(message, hint=printable(status.hint or "job.logs() has its last words"))
