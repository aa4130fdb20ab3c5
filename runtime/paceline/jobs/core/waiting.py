"""Whether what somebody waits for has come."""

from __future__ import annotations

from paceline.jobs.interface import SUSPENDED, TRAINING, JobStatus, Until


def reached(status: JobStatus, until: Until) -> bool:
    """True too for a job that has ended: it will never be what is waited for."""
    if status.ended:
        return True
    match until:
        case Until.ENDED:
            return False
        case Until.TRAINING:
            return status.state == TRAINING and status.ready == status.replicas
        case Until.SUSPENDED:
            return status.state == SUSPENDED
