"""The fields of a TrainingJob's spec, and when a change of each acts.

`ACTS` is the one table of this. From it come the rules with which the API server refuses a change
(`crdgen`), the notes in the definition, the column in docs/reference/trainingjob.md, the file that
a job's pods read, and a test for each field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, Final

from paceline_api.defaults import model_of
from paceline_api.types.job import TrainingJobSpec
from paceline_api.types.model import Model

TEMPLATE: Final = "template"
"""The field that counts as a whole, because most of it is defined by Kubernetes."""


class Acts(StrEnum):
    """When a change of a field acts on a job that exists."""

    AT_ONCE = "at once"
    """On a running job, within seconds, and on its running ranks if it is about them."""
    NEXT_ATTEMPT = "at the next attempt"
    """On pods that are made from then on; those that run keep the earlier value."""
    AFTER_SUSPENSION = "after a suspension"
    """When the job is resumed. The API server refuses the change unless the job is suspended."""
    NEVER = "never"
    """The API server refuses the change; only a new job can have another value."""


_PATHS: Final[Mapping[Acts, tuple[str, ...]]] = {
    Acts.AT_ONCE: (
        *("replicas", "minReplicas", "maxReplicas", "suspend"),
        *("ttlSecondsAfterFinished", "activeDeadlineSeconds", "cleanPodPolicy"),
        *("collective.mode", "collective.quorum", "collective.randomInitiator"),
        *("collective.deadline", "collective.deadlineFactor", "collective.grace"),
        *("collective.warmupRounds", "collective.fullEvery", "collective.maxAge"),
        *("collective.maxAgePolicy", "collective.decayFactor", "collective.benchAfter"),
        *("collective.buffers.policy", "collective.buffers.everyRounds"),
        *("collective.overlap", "collective.hashEveryRounds"),
        *("straggler.detect.windowRounds", "straggler.detect.slowdownFactor"),
        *("straggler.respond", "straggler.cooldownSeconds"),
        *("fabric.preflight.enabled", "fabric.preflight.timeoutSeconds"),
        *("elasticity.nodeLostSeconds", "elasticity.disruptionBudget"),
        *("elasticity.settleSeconds", "elasticity.stabilizationSeconds"),
        *("elasticity.allowedSizes", "checkpoint.required", "failurePolicy.maxSkippedBatches"),
        *("scheduling.gang.minCount", "scheduling.startDeadlineSeconds"),
    ),
    Acts.NEXT_ATTEMPT: (
        *("coordinator.resources", "coordinator.nodeSelector", "coordinator.tolerations"),
        *("coordinator.affinity", "coordinator.priorityClassName"),
        *("elasticity.drainGraceSeconds", "elasticity.autoscaler"),
    ),
    Acts.AFTER_SUSPENSION: (
        *("finishDeadlineSeconds", "stepDeadlineSeconds", "backoffLimit"),
        *("failurePolicy.rules", "checkpoint.everyRounds", "checkpoint.keep"),
        "logging.tensorBoard",
        # Pods are made as members of a gang or not; members alone would wait for ever.
        "scheduling.gang",
        TEMPLATE,
    ),
    Acts.NEVER: (
        *("runtimeRef.kind", "runtimeRef.name"),
        *("procsPerReplica", "parallelism.model", "managedBy"),
        *("collective.backend", "collective.normalisation", "collective.pacing"),
        *("collective.freezeTimeout", "collective.segmentBytes", "collective.wire"),
        "collective.pipeline",
        *("fabric.profile", "fabric.required"),
        *("checkpoint.path", "checkpoint.claimName"),
        *("scheduling.provider", "scheduling.topologyKey"),
        "metrics.port",
    ),
}
ACTS: Final[Mapping[str, Acts]] = {path: acts for acts, paths in _PATHS.items() for path in paths}
"""When a change acts, by path below `spec`. The path of a mapping stands for setting or removing
it as a whole; what it holds is told by the paths below it."""


@cache
def leaves() -> tuple[str, ...]:
    """Return the paths below `spec` of all fields that hold a value, in the order of the schema."""
    return tuple(path for path, is_leaf in _walk(TrainingJobSpec) if is_leaf)


@cache
def mappings() -> tuple[str, ...]:
    """Return the paths below `spec` of all fields that hold further fields of Paceline."""
    return tuple(path for path, is_leaf in _walk(TrainingJobSpec) if not is_leaf)


def _walk(model: type[Model], above: str = "") -> Iterator[tuple[str, bool]]:
    for field in model.model_fields.values():
        assert field.alias is not None
        path = above + field.alias
        inner = model_of(field.annotation)
        many = "tuple[" in str(field.annotation)
        is_leaf = inner is None or many or path == TEMPLATE
        yield path, is_leaf
        if inner is not None and not is_leaf:
            yield from _walk(inner, f"{path}.")


def acts_on(path: str) -> Acts:
    """Return when a change of a field acts.

    Args:
        path: Path below `spec`, of a field that holds a value or of a part of one.

    Returns:
        The entry of the table for the field, or for the field that it is a part of.

    Raises:
        LookupError: The table has no entry for it.
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in ACTS and (length == len(parts) or prefix not in mappings()):
            return ACTS[prefix]
    raise LookupError(f"paceline_api/fields.py: say in _PATHS when a change of {path} acts")


_MISSING: Final = object()


def value_at(spec: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value of a field in a spec that is plain data; `default` if it is not set."""
    value: Any = spec
    for part in path.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING or value is None:
            return default
    return value


def picked(spec: Mapping[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the part of a spec that these paths name, in the form of a spec.

    Args:
        spec: The spec as plain data.
        paths: Paths below `spec`; those that are not set are left out.

    Returns:
        Nested mappings with the values of these fields.
    """
    made: dict[str, Any] = {}
    for path in paths:
        value = value_at(spec, path, _MISSING)
        if value is _MISSING:
            continue
        *above, name = path.split(".")
        below = made
        for part in above:
            below = below.setdefault(part, {})
        below[name] = value
    return made


def written(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of the fields that a spec, as plain data, sets itself."""
    return tuple(path for path in leaves() if value_at(spec, path, _MISSING) is not _MISSING)


def revision(spec: Mapping[str, Any]) -> str:
    """Return a digest of what a spec says about the fields that act after a suspension.

    Pods with another digest belong to the time before a suspension. Only what the user wrote
    counts, so a release with other defaults or further fields gives the same digest.

    Args:
        spec: The spec as plain data.

    Returns:
        Eight hexadecimal digits.
    """
    values = {
        path: path in mappings() or value
        for path in _PATHS[Acts.AFTER_SUSPENSION]
        if (value := value_at(spec, path)) is not None
    }
    return digest(json.dumps(values, sort_keys=True))


def digest(text: str) -> str:
    """Return eight hexadecimal digits that tell this text from another one of the same job."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
