"""What the operator asks of whoever starts the workers of a job."""

# ruff: noqa: ARG002 - nobody in particular needs nothing of what the others are given

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline_api.reasons import Reason
from paceline_api.types.enums import SchedulingProvider

from paceline_operator.core.job import Job
from paceline_operator.core.observed import Observed
from paceline_operator.core.plan import Plan


@dataclass(frozen=True, slots=True)
class GroupApi:
    """The group object of a provider."""

    resource: str
    """As kubectl names it: plural and API group."""
    version: str
    """Its apiVersion."""
    install: str
    """What to do where the cluster does not serve it."""


class Provider:
    """The scheduler of the cluster, which starts each pod on its own. Others differ where their
    class says so."""

    name: ClassVar[SchedulingProvider] = SchedulingProvider.NONE
    api: ClassVar[GroupApi | None] = None
    """Of a provider whose gangs have a group object."""

    def fewest(self, job: Job) -> int:
        """Members of the group for which there must be room at once; 0: no group."""
        return 0

    def group(self, job: Job) -> dict[str, Any]:
        """Spec of the group object, for a job with `fewest`."""
        raise NotImplementedError(f"{self.name} has no groups")

    def join(self, job: Job, pod: dict[str, Any]) -> None:
        """Adds to a worker's pod what the provider wants to find in it."""

    def hold_back(self, job: Job, seen: Observed, plan: Plan) -> Mapping[str, str]:
        """Takes those new pods out of the plan for which there is no place; gives annotations for
        the others."""
        return {}

    def waits(self, job: Job, plan: Plan) -> str:
        """Why no worker can have started yet: then nobody needs a coordinator. Empty: they may."""
        return ""

    def trouble(self, job: Job, plan: Plan) -> tuple[Reason, str] | None:
        """What a user has to mend before it goes as the job says."""
        return None
