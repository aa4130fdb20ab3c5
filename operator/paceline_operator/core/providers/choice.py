"""The choice of a job's provider, made nowhere else."""

from __future__ import annotations

from typing import Final

from paceline_api.types.enums import SchedulingProvider

from paceline_operator.core.job import JobObject
from paceline_operator.core.providers.base import GroupApi, Provider
from paceline_operator.core.providers.gangs import Coscheduling, Kai, Native, Volcano
from paceline_operator.core.providers.kueue import Kueue

NOBODY: Final = Provider()
"""Provider of jobs without gang and queue."""
KUEUE: Final = Kueue()
GANGS: Final = {gang.name: gang for gang in (Native(), Volcano(), Coscheduling(), Kai())}
GROUP_APIS: Final[tuple[GroupApi, ...]] = tuple(gang.api for gang in GANGS.values())
"""Group objects of all gang schedulers."""


def provider_of(job: JobObject) -> Provider:
    """Return the provider of a job. Auto selects Kueue for a job with a queue label, else none."""
    if job.fixed_size:
        return KUEUE
    scheduling = job.spec.scheduling if job.spec else None
    wanted = scheduling.provider if scheduling else None
    return GANGS.get(wanted or SchedulingProvider.NONE, NOBODY)
