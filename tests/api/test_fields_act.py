"""Each field of a TrainingJob that the runtime obeys reaches the settings of the runtime.

The effect of each setting is tested where it is used; docs/testing.md names the test of each field.
"""

from __future__ import annotations

import pytest
from paceline_api.rounds import RoundSettings
from paceline_api.types.job import TrainingJob

from scripts.field_reference import leaves
from testing.field_samples import SAMPLES, resolved

OPERATORS_ALONE = {
    *("managedBy", "ttlSecondsAfterFinished", "cleanPodPolicy", "elasticity.autoscaler"),
    *("coordinator.resources", "coordinator.nodeSelector", "coordinator.tolerations"),
    *("coordinator.affinity", "coordinator.priorityClassName", "elasticity.disruptionBudget"),
    *("fabric.profile", "fabric.required", "fabric.preflight.enabled"),
    *("fabric.preflight.timeoutSeconds", "checkpoint.claimName", "scheduling.gang.minCount"),
    *("scheduling.topologyKey", "scheduling.startDeadlineSeconds"),
    *("template.metadata.labels", "template.metadata.annotations"),
    *("template.spec.containers.image", "template.spec.restartPolicy"),
}
"""Fields that only the operator reads, from the spec; no setting of the runtime depends on them."""
BEYOND_OVERRIDES = {
    "runtimeRef.kind": "test_another_runtime_than_the_job_names_is_refused",
    "runtimeRef.name": "test_another_runtime_than_the_job_names_is_refused",
    "scheduling.provider": "test_kueue_fixes_the_size",
    "template.spec.containers.name": "test_gpus_of_another_container_are_not_for_ranks",
    "template.spec.containers.resources.limits.nvidia.com/gpu": (
        "test_each_gpu_of_a_worker_gets_a_rank"
    ),
}
"""Fields that one override cannot cover, with their tests in tests/api."""
NOT_OF_ROUNDS = ("backend", "freezeTimeout", "segmentBytes", "wire")
"""Fields of `spec.collective` that are set once for the whole job."""


def test_every_field_has_a_sample_or_is_read_only_by_the_operator() -> None:
    known = SAMPLES.keys() | OPERATORS_ALONE | BEYOND_OVERRIDES.keys()
    assert known == leaves(TrainingJob).keys()


@pytest.mark.parametrize("field", SAMPLES)
def test_each_field_changes_the_settings_of_the_runtime(field: str) -> None:
    *before, last = SAMPLES[field]
    without, with_it = resolved(tuple(before)), resolved((*before, last))
    assert without != with_it
    part, _, name = field.partition(".")
    if part == "collective" and name not in NOT_OF_ROUNDS:
        assert RoundSettings.of(without.collective) != RoundSettings.of(with_it.collective)
