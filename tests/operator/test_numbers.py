"""Numbers in labels and quantities that others have written, however long they are."""

from __future__ import annotations

import pytest
from paceline_api.names import LABEL_ATTEMPT, LABEL_JOB, LABEL_ROLE, LABEL_SLOT
from paceline_api.pods.devices import amount_of
from paceline_operator.cluster.wire import Meta, PodObject, pod_of
from paceline_operator.core.observed import NO_SLOT


@pytest.mark.parametrize("digits", [21, 5_000])
def test_a_slot_with_too_many_digits_is_ignored(digits: int) -> None:
    labels = {LABEL_JOB: "a", LABEL_ROLE: "worker", LABEL_SLOT: "9" * digits, LABEL_ATTEMPT: "1"}
    parsed = pod_of(PodObject(Meta(labels=labels, resource_version="9" * digits)), 0.0)
    assert parsed is not None
    _, _, pod = parsed
    assert (pod.slot, pod.attempt, pod.version) == (NO_SLOT, 1, 0)


@pytest.mark.parametrize("digits", [16, 5_000])
def test_a_device_count_beyond_any_node_is_read_as_zero(digits: int) -> None:
    assert amount_of("9" * digits) == 0
    assert amount_of("8") == 8
    assert amount_of("1k") == 1000
