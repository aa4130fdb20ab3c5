"""Construction of a TrainingJob whose program is a function, from the arguments of `train`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from paceline_api.errors import SpecError
from paceline_api.reading.load import job_from_mapping
from paceline_api.types.job import API_VERSION, KIND, RuntimeRef, TrainingJob
from paceline_api.types.model import Model
from paceline_api.types.template import TRAINER, PodTemplate
from pydantic.alias_generators import to_camel

from paceline.jobs.core.script_job import default_image

COMMAND: Final = ["python3", "-m", "paceline.function.start"]
SUFFIX_CHARS: Final = 5


def function_job(
    name: str,
    *,
    replicas: int,
    template: object,
    image: str | None,
    env: Mapping[str, str],
    resources: Mapping[str, str | int],
    runtime: RuntimeRef | str | None = None,
    spec: Mapping[str, Any],
) -> TrainingJob:
    """Return a valid TrainingJob that runs a function.

    An invalid field raises InvalidJobError, and a template whose trainer has a command SpecError.

    Args:
        name: Name of the job.
        replicas: Number of workers.
        template: A PodTemplate, an object that can be converted to one, a mapping as in YAML, or
            None.
        image: Image of the trainer; None keeps that of the template or runtime, or takes the
            default image where neither was given.
        env: Environment variables of the trainer, added to those of the template.
        resources: Resource limits of the trainer, added to those of the template.
        runtime: Runtime that the job is merged with, or the name of a ClusterTrainingRuntime.
        spec: Further fields of a TrainingJobSpec by their Python names.

    Returns:
        The job.
    """
    ref = RuntimeRef(name=runtime) if isinstance(runtime, str) else runtime
    if image is None and template is None and ref is None:
        image = default_image()
    pod = _template(template, image, env, resources)
    further = {to_camel(field): _plain(value) for field, value in spec.items()}
    if ref is not None:
        further["runtimeRef"] = _plain(ref)
    return job_from_mapping(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "spec": {"replicas": replicas, **further, "template": pod},
        }
    )


def _template(
    given: object, image: str | None, env: Mapping[str, str], resources: Mapping[str, str | int]
) -> dict[str, Any]:
    template: dict[str, Any]
    if given is None:
        template = {"spec": {"containers": [{"name": TRAINER}]}}
    elif isinstance(given, Mapping):
        template = copy.deepcopy(dict(given))
    else:
        template = _plain(PodTemplate.model_validate(given))
    for container in template.get("spec", {}).get("containers", ()):
        if container.get("name") == TRAINER:
            _equip(container, image, env, resources)
    return template


def _equip(
    container: dict[str, Any],
    image: str | None,
    env: Mapping[str, str],
    resources: Mapping[str, str | int],
) -> None:
    if (command := container.get("command")) is not None:
        raise SpecError(
            "template.spec.containers[trainer].command",
            command,
            "is given, and the function is what the trainer runs",
            hint="leave the command out, or submit a TrainingJob without a function",
        )
    container["command"] = COMMAND
    if image is not None:
        container["image"] = image
    if env:
        more = [{"name": key, "value": value} for key, value in env.items()]
        container["env"] = [*container.get("env", ()), *more]
    if resources:
        limits = {key: str(amount) for key, amount in resources.items()}
        own = container.setdefault("resources", {})
        own["limits"] = {**own.get("limits", {}), **limits}


def _plain(value: Any) -> Any:
    """Return a model as a mapping like in YAML, and any other value unchanged."""
    if isinstance(value, Model):
        return value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return value
