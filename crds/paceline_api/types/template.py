"""`spec.template`: the part of a PodTemplateSpec that Paceline itself reads.

Everything else in the template is kept as it is, and the API server checks it when the first pod is
created. On a laptop the container `trainer` is run as local processes and the rest is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from paceline_api.types.model import Devices, OpenModel

TRAINER: Final = "trainer"
CONTAINERS_MAX: Final = 15
"""Upper bound on the containers. With one more, an API server before 1.34 rejects the rule about
their GPUs as too expensive."""
ENV_MAX: Final = 256

Name63 = Annotated[str, Field(max_length=63)]
Argument = Annotated[str, Field(max_length=65_536)]


class EnvVar(OpenModel):
    """One environment variable."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the environment variable."""

    value: str | None = None
    """Value of the variable; $(NAME) stands for a variable defined above it."""

    value_from: dict[str, Any] | None = None
    """Source of the value in the cluster. Without meaning on a laptop."""


class Limits(OpenModel):
    """Resource limits of a container; other resources than GPUs are kept as they are."""

    gpus: Annotated[Devices | None, Field(alias="nvidia.com/gpu")] = None
    """GPUs of the worker. Each of its ranks takes one, see procsPerReplica."""


class Resources(OpenModel):
    """Resources of a container."""

    limits: Limits | None = None
    """The most of each resource that the container gets, and of devices also the least."""


class Container(OpenModel):
    """One container of the pod."""

    name: Name63
    """Name of the container. `trainer` is the one in which the ranks run."""

    image: str | None = None
    """Image of the container. Without meaning on a laptop."""

    command: Annotated[tuple[Argument, ...], Field(max_length=1024)] | None = None
    """Program and its first arguments. The trainer must have one, because the agent starts it once
    for each rank; the image's entrypoint is not used."""

    args: Annotated[tuple[Argument, ...], Field(max_length=1024)] | None = None
    """Further arguments of the command."""

    working_dir: str | None = None
    """Folder in which the command starts. On a laptop: relative to the job file's folder."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=ENV_MAX)] | None = None
    """Environment variables of the command."""

    resources: Resources | None = None
    """Resources of the container. On a laptop: the number of GPUs sets that of the ranks."""

    @property
    def gpus(self) -> int:
        """Number of GPUs in the container's limits."""
        limits = self.resources.limits if self.resources else None
        return int(limits.gpus or 0) if limits else 0


class PodSpec(OpenModel):
    """Spec of the worker's pod."""

    containers: Annotated[tuple[Container, ...], Field(min_length=1, max_length=CONTAINERS_MAX)]
    """Containers of the pod; one of them is named `trainer`."""

    restart_policy: Annotated[str, Field(max_length=16)] | None = None
    """Never, or unset: a rank is restarted by its agent and a pod by the operator."""


class TemplateMetadata(OpenModel):
    """Metadata of the worker's pod."""

    labels: Annotated[dict[str, str], Field(max_length=128)] | None = None
    """Labels of the worker pods, beside those that Paceline sets."""

    annotations: Annotated[dict[str, str], Field(max_length=128)] | None = None
    """Annotations of the worker pods."""


def _as_in_yaml(value: Any) -> Any:
    """Return an object of the package `kubernetes` as plain data, as in YAML.

    Args:
        value: An object, recognized by its map of attribute names, or data.

    Returns:
        Mappings, lists and scalars.
    """
    if (names := getattr(value, "attribute_map", None)) is not None:
        fields = {alias: getattr(value, name) for name, alias in names.items()}
        return {alias: _as_in_yaml(one) for alias, one in fields.items() if one is not None}
    if isinstance(value, Mapping):
        return {key: _as_in_yaml(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_in_yaml(one) for one in value]
    return value.isoformat() if isinstance(value, datetime) else value


class PodTemplate(OpenModel):
    """Template of a worker's pod, as in a Job.

    In Python, a kubernetes.client.V1PodTemplateSpec is accepted as well.
    """

    metadata: TemplateMetadata | None = None
    """Labels and annotations of the worker pods."""

    spec: PodSpec
    """The worker's pod, as in a Job."""

    @model_validator(mode="before")
    @classmethod
    def _from_kubernetes(cls, value: Any) -> Any:
        return _as_in_yaml(value) if hasattr(value, "attribute_map") else value

    def trainer(self) -> Container | None:
        """Return the container in which the ranks run; None if there is none."""
        return next((c for c in self.spec.containers if c.name == TRAINER), None)
