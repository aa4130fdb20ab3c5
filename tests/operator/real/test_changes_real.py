"""A change of each field on a real API server: refused, or in force when the table says so."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from paceline_api.fields import ACTS, Acts

from testing.cluster.api import ApiError
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import (
    JOBS,
    Running,
    change,
    holds,
    job,
    living,
    pods,
    submit,
    until,
)
from testing.fake_cluster.stub import Fleet
from testing.field_changes import CHANGES, RULE, placed, spec_with, template
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

WAY_OUT = {
    Acts.AFTER_SUSPENSION: "can be changed only while the job is suspended; set spec.suspend to "
    "true first, or make a new job",
    Acts.NEVER: "cannot be changed; set it back, or make a new job",
}


def refused(plane: ControlPlane, path: str, spec: dict[str, Any]) -> str:
    """Return what the API server says to a patch of the spec; empty if it takes it."""
    try:
        plane.api.patch(f"{path}?dryRun=All", {"spec": spec})
    except ApiError as error:
        return error.reason
    return ""


@pytest.mark.parametrize("field", exhaustive_except(sorted(CHANGES)[::6], sorted(CHANGES)))
def test_the_api_server_takes_the_changes_that_act(
    plane: ControlPlane, namespace: str, field: str
) -> None:
    trial = CHANGES[field]
    submit(plane, namespace, **spec_with(field, trial.first))
    path = f"{JOBS.format(namespace)}/digits"
    changed = placed(field, trial.second)
    removed = placed(field, None)
    wanted = WAY_OUT.get(ACTS[field])
    for patch in (changed, removed):
        message = refused(plane, path, patch)
        if wanted is None:
            assert f"spec.{field} can" not in message
        elif patch is changed or trial.first is not None:
            assert f"spec.{field} {wanted}" in message or f"spec.{field}: Required" in message
    if wanted is None:
        assert refused(plane, path, changed) == ""
    change(plane, namespace, suspend=True)
    message = refused(plane, path, changed)
    assert bool(message) == (ACTS[field] is Acts.NEVER), message
    # In the update that resumes the job, too: a queue sets the placement with it.
    resumed = refused(plane, path, {"suspend": False} | changed)
    assert bool(resumed) == (ACTS[field] is Acts.NEVER), resumed


@pytest.mark.exhaustive
def test_a_suspended_job_is_resumed_with_what_was_changed(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    first: dict[str, Any] = {"checkpoint": {"path": "/c"}, "elasticity": {"settleSeconds": 1}}
    with plane.fake_nodes(3), Fleet(plane, namespace):
        submit(plane, namespace, replicas=2, template=template(), **first)
        until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
        before = secrets(plane, namespace)
        assert len(before) == 1
        change(plane, namespace, suspend=True)
        until(lambda: job(plane, namespace)["status"]["state"] == "Suspended", "suspended")
        until(lambda: not living(plane, namespace), "no pods")
        trainer = template(
            image="trainer:2",
            command=["python3", "other.py"],
            args=["--epochs=3"],
            env=[{"name": "SEED", "value": "7"}],
            resources={"limits": {"nvidia.com/gpu": 0}},
        )
        change(
            plane,
            namespace,
            template=trainer,
            backoffLimit=3,
            failurePolicy={"rules": [RULE]},
            checkpoint={"everyRounds": 50},
            elasticity={"settleSeconds": None, "allowedSizes": [1, 2]},
        )
        change(plane, namespace, suspend=False)
        until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady again")
        status = job(plane, namespace)["status"]
        assert status["observedGeneration"] == job(plane, namespace)["metadata"]["generation"]
        assert status["resolved"]["backoffLimit"] == 3
        assert status["resolved"]["checkpoint"]["everyRounds"] == 50
        assert status["resolved"]["elasticity"]["settleSeconds"] == 30, "its default again"
        after = secrets(plane, namespace)
        assert len(after) == 2
        now = [pod for pod in pods(plane, namespace) if pod["status"]["phase"] == "Running"]
        assert {mounted(pod) for pod in now} == set(after) - set(before)
        file = json.loads(after[mounted(now[0])])
        assert file["command"] == ["python3", "other.py", "--epochs=3"]
        assert file["backoffLimit"] == 3
        assert file["checkpoint"]["everyRounds"] == 50
        assert [rule["on_exit_codes"] for rule in file["failureRules"]] == [[7]]
        assert file["job"]["elasticity"]["allowed_sizes"] == [1, 2]
        (container,) = now[0]["spec"]["containers"]
        assert container["image"] == "trainer:2"
        assert {"name": "SEED", "value": "7"} in container["env"]


def test_a_right_to_delete_secrets_would_read_them(plane: ControlPlane, namespace: str) -> None:
    """The operator has no such right; a Secret from before a suspension stays with its job."""
    path = f"/api/v1/namespaces/{namespace}/secrets"
    plane.api.create(path, {"metadata": {"name": "of-a-user"}, "stringData": {"word": "secret"}})
    answer = plane.api.request("DELETE", f"{path}/of-a-user?propagationPolicy=Foreground")
    secret = json.loads(answer)
    assert base64.b64decode(secret["data"]["word"]) == b"secret"


def secrets(plane: ControlPlane, namespace: str) -> dict[str, bytes]:
    """Return the job file in each Secret of the job, by name."""
    items = plane.api.items(
        f"/api/v1/namespaces/{namespace}/secrets", labels="app.kubernetes.io/instance=digits"
    )
    return {s["metadata"]["name"]: base64.b64decode(s["data"]["job.json"]) for s in items}


def mounted(pod: dict[str, Any]) -> str:
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    name: str = volumes["paceline-job"]["secret"]["secretName"]
    return name
