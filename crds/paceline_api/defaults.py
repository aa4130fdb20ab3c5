"""Defaults: gives every behavior that the user left open its value.

The CRD fills in structure only, because its defaults would also change stored objects (C12). A job
is completed when it starts and keeps these values, whatever a later release defaults to. Completing
a job twice changes nothing.
"""

from __future__ import annotations

import types
import typing
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from paceline_api.types.enums import SchedulingProvider
from paceline_api.types.job import TrainingJob
from paceline_api.types.model import DEFAULT_KEY, Model

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

_Part = TypeVar("_Part", bound=Model)


def with_defaults(job: TrainingJob) -> TrainingJob:
    """Return the job with every behavior set; `maxReplicas` stays None without a limit."""
    spec = _completed(job.spec)
    sizes = {"procs_per_replica": procs_of(job)}
    if fixed_by_queue(job):
        sizes |= {
            "min_replicas": spec.min_replicas or spec.replicas,
            "max_replicas": spec.max_replicas or spec.replicas,
        }
    elif spec.min_replicas is None:
        sizes["min_replicas"] = 1
    return job.model_copy(update={"spec": spec.model_copy(update=sizes)})


def procs_of(job: TrainingJob) -> int:
    """Return the ranks in each worker: as set, else one for each GPU, and at least 1."""
    trainer = job.spec.trainer()
    return job.spec.procs_per_replica or max(1, trainer.gpus if trainer else 0)


def fixed_by_queue(job: TrainingJob) -> bool:
    """Return True if Kueue admits the job; it then has a fixed number of workers (C16)."""
    scheduling = job.spec.scheduling
    provider = scheduling.provider if scheduling else None
    if provider in (None, SchedulingProvider.AUTO):
        return QUEUE_LABEL in (job.metadata.labels or {})
    return provider is SchedulingProvider.KUEUE


def _completed(part: _Part) -> _Part:
    update: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if value is None and _has_behaviour(field):
            inner = model_of(field.annotation)
            value = inner() if inner else default_of(field)
        if isinstance(value, Model):
            value = _completed(value)
        if value is not getattr(part, name):
            update[name] = value
    return part.model_copy(update=update) if update else part


def _has_behaviour(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and DEFAULT_KEY in field.json_schema_extra


def default_of(field: FieldInfo) -> Any:
    """Return the default that `behaviour(...)` declares for the field; None without one."""
    extra = field.json_schema_extra
    return extra.get(DEFAULT_KEY) if isinstance(extra, dict) else None


def model_of(annotation: Any) -> type[Model] | None:
    """Return the `Model` in `Model | None` or `tuple[Model, ...]`; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union, tuple, typing.Annotated):
        models = (model_of(inner) for inner in typing.get_args(annotation))
        return next((model for model in models if model), None)
    return None
