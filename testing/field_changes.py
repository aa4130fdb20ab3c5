"""Two values for each field of the table `paceline_api.fields.ACTS`, to try what a change does."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from paceline_api.fields import TEMPLATE


@dataclass(frozen=True)
class Change:
    """A change of one field of a job."""

    first: Any
    """Value that the job is created with; None leaves the field out."""
    second: Any
    """Value that it is changed to."""
    needs: dict[str, Any] = field(default_factory=dict)
    """Fields that must stand beside it, by path."""


def template(**trainer: Any) -> dict[str, Any]:
    """Return a template whose trainer has these fields."""
    plain = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    return {"spec": {"containers": [plain | trainer]}}


_MAJORITY = {"collective.mode": "Majority"}
_DEADLINE = {"collective.mode": "Deadline", "collective.deadline": "auto"}
_CHECKPOINT = {"checkpoint.path": "/kept"}
_VOLCANO = {"scheduling.provider": "Volcano"}
RULE = {"action": "FailJob", "onExitCodes": [7]}
CHANGES: dict[str, Change] = {
    "replicas": Change(2, 3),
    "minReplicas": Change(1, 2),
    "maxReplicas": Change(4, 5),
    "suspend": Change(False, True),
    "ttlSecondsAfterFinished": Change(60, 70),
    "activeDeadlineSeconds": Change(9000, 8000),
    "scheduling.startDeadlineSeconds": Change(9000, 8000),
    "cleanPodPolicy": Change("All", "None"),
    "collective.mode": Change("Full", "Solo"),
    "collective.quorum": Change("50%", 2),
    "collective.randomInitiator": Change(False, True, _MAJORITY),
    "collective.deadline": Change("40ms", "50ms", {"collective.mode": "Deadline"}),
    "collective.deadlineFactor": Change(2.5, 4.0, _DEADLINE),
    "collective.grace": Change("7ms", "9%"),
    "collective.warmupRounds": Change(3, 4),
    "collective.fullEvery": Change(3, 4),
    "collective.maxAge": Change(3, 5),
    "collective.maxAgePolicy": Change("Decay", "Wait"),
    "collective.decayFactor": Change(0.25, 0.75, {"collective.maxAgePolicy": "Decay"}),
    "collective.benchAfter": Change("33s", "44s"),
    "collective.buffers.policy": Change("Average", "Local"),
    "collective.buffers.everyRounds": Change(7, 8),
    "collective.overlap": Change("Auto", "Never"),
    "collective.hashEveryRounds": Change(9, 0),
    "straggler.detect.windowRounds": Change(7, 8),
    "straggler.detect.slowdownFactor": Change(2.5, 3.5),
    "straggler.respond": Change(["Tolerate"], ["RestartInPlace", "Replace"]),
    "straggler.cooldownSeconds": Change(7, 8),
    "fabric.preflight.enabled": Change(True, False),
    "fabric.preflight.timeoutSeconds": Change(7, 8),
    "elasticity.nodeLostSeconds": Change(7, 8),
    "elasticity.disruptionBudget": Change(False, True),
    "scheduling.gang.minCount": Change(1, 2, _VOLCANO),
    "coordinator.resources": Change({"requests": {"cpu": "1"}}, {"requests": {"cpu": "2"}}),
    "coordinator.nodeSelector": Change({"pool": "a"}, {"pool": "b", "zone": "c"}),
    "coordinator.tolerations": Change([{"key": "a"}], [{"key": "b"}]),
    "coordinator.affinity": Change({"podAffinity": {}}, {"podAntiAffinity": {}}),
    "coordinator.priorityClassName": Change("low", "high"),
    "elasticity.drainGraceSeconds": Change(7, 8),
    "elasticity.autoscaler": Change("Keep", "MayEvict"),
    "finishDeadlineSeconds": Change(60, 70),
    "stepDeadlineSeconds": Change(60, 70),
    "backoffLimit": Change(1, 0),
    "failurePolicy.rules": Change([RULE], [RULE | {"action": "Ignore"}]),
    "failurePolicy.maxSkippedBatches": Change(1, 2),
    "elasticity.settleSeconds": Change(7, 8),
    "elasticity.stabilizationSeconds": Change(7, 8),
    "elasticity.allowedSizes": Change([1, 2], [2, 4]),
    "checkpoint.everyRounds": Change(7, 8, _CHECKPOINT),
    "checkpoint.keep": Change(7, 8, _CHECKPOINT),
    "checkpoint.required": Change(False, True, _CHECKPOINT),
    "logging.tensorBoard": Change("/events", "/other"),
    "scheduling.gang": Change(None, {}, _VOLCANO),
    TEMPLATE: Change(template(), template(args=["--other"])),
    "runtimeRef.kind": Change(
        "ClusterTrainingRuntime", "TrainingRuntime", {"runtimeRef.name": "a"}
    ),
    "runtimeRef.name": Change("a", "b"),
    "procsPerReplica": Change(1, 2),
    "parallelism.model": Change(1, 2, {"procsPerReplica": 2}),
    "managedBy": Change("paceline.dev/operator", "another"),
    "collective.backend": Change("gloo", "mpi"),
    "collective.normalisation": Change("Fixed", "Applied"),
    "collective.pacing": Change("Round", "Samples"),
    "collective.freezeTimeout": Change("33s", "44s"),
    "collective.segmentBytes": Change(65536, 131072),
    "collective.wire": Change("Float32", "BFloat16"),
    "collective.pipeline": Change(0, 1),
    "fabric.profile": Change("tcp", "auto"),
    "fabric.required": Change("Any", "RDMA"),
    "checkpoint.path": Change("/kept", "/elsewhere"),
    "checkpoint.claimName": Change("a", "b", _CHECKPOINT),
    "scheduling.provider": Change("None", "Volcano"),
    "scheduling.topologyKey": Change("rack", "zone"),
    "metrics.port": Change(9999, 9998),
}
"""Path below `spec` -> change. All of them are valid, so only the rules about changes may refuse
one."""


def placed(path: str, value: Any) -> dict[str, Any]:
    """Return a merge patch of the spec that sets a field; None removes it."""
    for part in reversed(path.split(".")):
        value = {part: value}
    patch: dict[str, Any] = value
    return patch


def spec_with(path: str, value: Any) -> dict[str, Any]:
    """Return fields of a spec: those that the change of `path` needs, and this value of it."""
    made: dict[str, Any] = {}
    for at, given in {**CHANGES[path].needs, path: value}.items():
        if given is not None:
            merge(made, placed(at, copy.deepcopy(given)))
    return made


def merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    """Merge nested mappings."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value
