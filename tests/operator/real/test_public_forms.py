"""Manifests in the forms of eleven projects and clouds, on a real API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.try_manifests import Template, job_of, judged, pod_of, templates_in, tried
from testing.cluster.api import ApiError
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import JOBS

pytestmark = pytest.mark.processes

MANIFESTS = Path(__file__).parents[3] / "testing" / "manifests"
MISSING = (
    'serviceaccount "trainer" not found',
    'RuntimeClass "nvidia" not found',
)
"""Objects that a few templates name and this cluster does not have."""


def templates() -> list[Template]:
    files = sorted(MANIFESTS.glob("*.yaml"))
    return [template for file in files for template in templates_in(file)[0]]


DRY_RUN = "?dryRun=All&fieldValidation=Strict"


def answers_to(plane: ControlPlane, template: Template) -> list[str]:
    """Return the refusals of the job of a template, or else of its pod, by the API server."""
    job, _ = job_of(template)
    messages = refusals(plane, JOBS.format("default"), job)
    pod, _, _ = pod_of(job)
    if pod is not None and not messages:
        del pod["metadata"]["ownerReferences"]
        messages = refusals(plane, "/api/v1/namespaces/default/pods", pod)
    return messages


def refusals(plane: ControlPlane, path: str, body: dict[str, Any]) -> list[str]:
    try:
        plane.api.create(f"{path}{DRY_RUN}", body)
    except ApiError as error:
        return [f"{body['kind']}: {error.reason}"]
    return []


def test_jobs_and_pods_of_the_templates_are_accepted_as_the_script_says(
    plane: ControlPlane,
) -> None:
    """It refuses no other job, and would make each pod, except where the cluster lacks objects.

    A launcher within a line of a shell is found by the operator and not by the API server.
    """
    missed: set[str] = set()
    refused = 0
    for template in templates():
        messages = answers_to(plane, template)
        if tried(template).word == "refused":
            assert all(line.startswith("TrainingJob: ") for line in messages), messages
            refused += bool(messages)
            continue
        assert tried(template).word == "carried", template.where
        matched = {words for words in MISSING for line in messages if words in line}
        assert len(matched) == len(messages), f"{template.where}: {messages}"
        missed |= matched
    assert missed == set(MISSING)
    assert refused >= 8


def test_the_script_quotes_a_cluster(plane: ControlPlane) -> None:
    missing = next(
        each
        for each in templates()
        if " JobSet resnet " not in each.where and "hyperpod" in each.where
    )
    (words,) = judged(plane.kubeconfig, missing)
    assert MISSING[0] in words
