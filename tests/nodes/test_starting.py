"""Pods that real kubelets cannot start: the condition has their words, and the deadline ends."""

from __future__ import annotations

import pytest

from testing.cluster.api import Json
from tests.nodes.jobs import CHANGE_S, START_S, NewJob

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]

REPORTED_S = START_S + 120.0
"""The operator tells a container that waits after a minute."""
LIMIT_S = 120


def test_a_volume_of_a_missing_secret_is_reported_until_the_deadline_fails_the_job(
    new_job: NewJob,
) -> None:
    """The status of such a pod says only ContainerCreating; its Events have the cause."""
    job = new_job()

    def mount(pod: Json) -> None:
        pod["volumes"].append({"name": "keys", "secret": {"secretName": "team-keys"}})
        mounts = pod["containers"][0].setdefault("volumeMounts", [])
        mounts.append({"name": "keys", "mountPath": "/keys"})

    job.apply(1, change=mount, scheduling={"startDeadlineSeconds": LIMIT_S})
    reported = job.wait_condition("Degraded", REPORTED_S, "PodNotStarting")
    words = 'MountVolume.SetUp failed for volume "keys" : secret "team-keys" not found'
    assert words in reported["message"]
    assert "job-0-1" in reported["message"]
    (pod,) = job.workers()
    (status,) = pod["status"]["containerStatuses"]
    assert status["state"]["waiting"]["reason"] == "ContainerCreating"
    failed = job.wait_condition("Failed", LIMIT_S + CHANGE_S, "StartDeadlineExceeded")
    assert f"within {LIMIT_S} s, spec.scheduling.startDeadlineSeconds" in failed["message"]
    assert words in failed["message"]
    job.until(lambda: not job.workers(), CHANGE_S, "without workers")


def test_a_sidecar_whose_image_cannot_be_pulled_is_reported_while_the_job_trains(
    new_job: NewJob,
) -> None:
    """It is no reason to end the job by startDeadlineSeconds, which has trained before."""
    job = new_job()
    image = "127.0.0.1:1/team/absent:1"  # nothing listens there
    sidecar = {"name": "metrics-proxy", "image": image}
    job.apply(
        1,
        long=True,
        change=lambda pod: pod["containers"].append(sidecar),
        scheduling={"startDeadlineSeconds": 600},
    )
    job.wait_trains(1)
    reported = job.wait_condition("Degraded", REPORTED_S, "PodNotStarting")
    assert "metrics-proxy" in reported["message"]
    assert "ImagePull" in reported["message"]
    assert image in reported["message"]
    assert job.condition("Ready")["status"] == "True"
    assert job.condition("Ready")["reason"] == "Training"
    job.wait_rounds(2)
    job.patch({"suspend": True})
    job.until(lambda: not job.workers(), CHANGE_S, "without workers")
