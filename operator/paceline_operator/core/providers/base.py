"""Interface between the operator and the scheduler that starts the workers of a job."""

# ruff: noqa: ARG002 - the default implementations ignore arguments that subclasses use

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline_api.reasons import Reason
from paceline_api.types.enums import SchedulingProvider

from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed
from paceline_operator.core.plan import PodPlan


@dataclass(frozen=True, slots=True)
class GroupApi:
    """The kind of group object that a provider requires for a gang."""

    resource: str
    """Plural name and API group, as kubectl writes them."""
    version: str
    """The apiVersion of the object."""
    install: str
    """Remedy if the cluster does not serve the object."""


class Provider:
    """The cluster's own scheduler, which starts each pod on its own.

    Subclasses override the methods in which another provider differs.
    """

    name: ClassVar[SchedulingProvider] = SchedulingProvider.NONE
    api: ClassVar[GroupApi | None] = None
    """Group object of the provider; None if its gangs have none."""

    def fewest(self, job: JobObject) -> int:
        """Return the number of members that must fit at once before any starts; 0: no group."""
        return 0

    def group(self, job: JobObject) -> dict[str, Any]:
        """Return the spec of the group object, for a job for which `fewest` is not 0.

        Args:
            job: The job.

        Returns:
            The spec.

        Raises:
            NotImplementedError: The provider has no groups.
        """
        raise NotImplementedError(f"{self.name} has no groups")

    def join(self, job: JobObject, pod: dict[str, Any]) -> None:
        """Add to a worker's pod, in place, what the provider requires in it."""

    def hold_back(self, job: JobObject, observed: Observed, plan: PodPlan) -> Mapping[str, str]:
        """Remove the new pods from the plan for which the provider has no place.

        Args:
            job: The job.
            observed: Everything observed besides the job.
            plan: The plan, which is modified.

        Returns:
            Annotations for the remaining new pods.
        """
        return {}

    def waits(self, job: JobObject, plan: PodPlan) -> str:
        """Return why no worker can have started, so that no coordinator is needed; else empty."""
        return ""

    def trouble(self, job: JobObject, plan: PodPlan) -> tuple[Reason, str] | None:
        """Return reason and message of a problem for the user to solve; None if there is none."""
        return None
