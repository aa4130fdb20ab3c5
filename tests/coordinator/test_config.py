"""The membership fields of a job reach the configuration of the coordinator."""

from __future__ import annotations

import pytest
from paceline.coordinator.config import config_of

from testing.field_samples import SAMPLES, resolved

MEMBERSHIP = (
    *("replicas", "minReplicas", "procsPerReplica", "backoffLimit", "collective.mode"),
    *("finishDeadlineSeconds", "stepDeadlineSeconds", "checkpoint.required"),
    "failurePolicy.maxSkippedBatches",
    *("collective.freezeTimeout", "elasticity.settleSeconds", "elasticity.stabilizationSeconds"),
    *("elasticity.allowedSizes", "failurePolicy.rules.action", "failurePolicy.rules.onExitCodes"),
    *("straggler.detect.windowRounds", "straggler.detect.slowdownFactor", "straggler.respond"),
    "straggler.cooldownSeconds",
)


@pytest.mark.parametrize("field", MEMBERSHIP)
def test_a_membership_field_of_the_job_reaches_the_coordinator(field: str) -> None:
    *before, last = SAMPLES[field]
    assert config_of(resolved(tuple(before))) != config_of(resolved((*before, last)))
