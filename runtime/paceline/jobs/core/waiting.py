"""Decision whether a wait for a job is over."""

from __future__ import annotations

from paceline.jobs.interface import SUSPENDED, TRAINING, JobStatus, Until


def reached(status: JobStatus, until: Until) -> bool:
    """Return True if the wait is over.

    It is over for a job that has ended, too, because such a job never meets another condition.

    Args:
        status: Latest status of the job.
        until: The condition.

    Returns:
        True if the job meets the condition or has ended.
    """
    if status.ended:
        return True
    match until:
        case Until.ENDED:
            return False
        case Until.TRAINING:
            return status.state == TRAINING and status.ready == status.replicas
        case Until.SUSPENDED:
            return status.state == SUSPENDED
