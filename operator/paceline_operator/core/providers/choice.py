"""The provider of a job: the one place that tells them apart."""

from __future__ import annotations

from typing import Final

from paceline_api.types.enums import SchedulingProvider

from paceline_operator.core.job import Job
from paceline_operator.core.providers.base import GroupApi, Provider
from paceline_operator.core.providers.gangs import Coscheduling, Kai, Native, Volcano
from paceline_operator.core.providers.kueue import Kueue

NOBODY: Final = Provider()
KUEUE: Final = Kueue()
GANGS: Final = {gang.name: gang for gang in (Native(), Volcano(), Coscheduling(), Kai())}
GROUP_APIS: Final[tuple[GroupApi, ...]] = tuple(gang.api for gang in GANGS.values())


def provider_of(job: Job) -> Provider:
    """Auto is Kueue for a job with its queue label, and nobody otherwise."""
    if job.fixed_size:
        return KUEUE
    scheduling = job.spec.scheduling if job.spec else None
    wanted = scheduling.provider if scheduling else None
    return GANGS.get(wanted or SchedulingProvider.NONE, NOBODY)
