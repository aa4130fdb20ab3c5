"""TrainingRuntime and ClusterTrainingRuntime: what a platform team says once for all jobs.

A runtime has the fields of a job at the same places, and the list of those that a job may override.
`spec.runtimeRef` of a job names one; `paceline_api.runtimes.merge` has the rules (C21).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from paceline_api.runtimes.merge import MAY_OVERRIDE
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.job import SharedSpec
from paceline_api.types.model import Model, OpenModel, behaviour
from paceline_api.types.status import JobCondition, StatusModel

PLURALS: Final = {
    RuntimeKind.NAMESPACED: "trainingruntimes",
    RuntimeKind.CLUSTER: "clustertrainingruntimes",
}
OVERRIDES_MAX: Final = 64

Override = Annotated[str, Field(min_length=1, max_length=512)]


class RuntimeOwnSpec(Model):
    """Fields that only a runtime has, and no job."""

    description: Annotated[str, Field(max_length=1024)] | None = None
    """What the runtime is for, for the people who choose one."""

    may_override: Annotated[tuple[Override, ...], Field(max_length=OVERRIDES_MAX)] | None = (
        behaviour(MAY_OVERRIDE)
    )
    """Fields that a job may set to another value than the runtime, by path below spec, such as
    template.spec.containers[trainer].image; everything below a field is included. What the runtime
    leaves open a job may always set. An empty list allows no override."""


class RuntimeSpec(SharedSpec, RuntimeOwnSpec):
    """What jobs of this runtime have in common: the fields of a job, except for its size."""


class RuntimeObjectStatus(StatusModel):
    """State of a runtime as last seen by the operator."""

    observed_generation: int | None = None
    """metadata.generation that this status is about."""

    conditions: Annotated[tuple[JobCondition, ...], Field(max_length=8)] = ()
    """Ready: whether a job that brings a command, and nothing else, is a valid job."""


class RuntimeMetadata(OpenModel):
    """Metadata of a runtime."""

    name: Annotated[str, Field(max_length=253)]
    """Name by which jobs ask for it."""


class TrainingRuntime(Model):
    """What the jobs of one namespace have in common, owned by a platform team."""

    api_version: Literal["paceline.dev/v1alpha1"]
    """paceline.dev/v1alpha1"""

    kind: Literal["TrainingRuntime", "ClusterTrainingRuntime"]
    """TrainingRuntime, or ClusterTrainingRuntime for all namespaces."""

    metadata: RuntimeMetadata
    """Name of the runtime."""

    spec: RuntimeSpec
    """What the jobs have in common, and what they may override."""

    status: RuntimeObjectStatus | None = None
    """State of the runtime as last seen by the operator."""
