"""The operator applies the Pod Security Standards as the API server's admission does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from paceline_api.pods.security import LABEL, Level, violations
from paceline_operator.core.job import read_job
from paceline_operator.core.pods import children

from testing.bad_pods import ALLOWED, BROKEN_BASELINE, BROKEN_RESTRICTED
from testing.cluster.api import ApiError
from testing.cluster.control_plane import ControlPlane
from testing.security_templates import ROWS

pytestmark = pytest.mark.processes

PODS = {
    **{name: body for name, (body, _) in BROKEN_BASELINE.items()},
    **{name: body for name, (body, _) in BROKEN_RESTRICTED.items()},
    **ALLOWED,
}


@pytest.fixture(params=[Level.BASELINE, Level.RESTRICTED])
def level(plane: ControlPlane, namespace: str, request: pytest.FixtureRequest) -> Level:
    body = {"metadata": {"labels": {LABEL: str(request.param)}}}
    plane.api.patch(f"/api/v1/namespaces/{namespace}", body)
    return Level(request.param)


def admitted(plane: ControlPlane, namespace: str, pod: dict[str, Any]) -> str:
    body = copy.deepcopy(pod)
    body["metadata"] = {**body["metadata"], "name": "x", "namespace": namespace}
    body |= {"apiVersion": "v1", "kind": "Pod"}
    try:
        plane.api.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", body)
    except ApiError as error:
        return str(error)
    return ""


def test_operator_and_admission_agree_on_each_pod(
    plane: ControlPlane, namespace: str, level: Level
) -> None:
    """Pods that are invalid for other reasons are skipped: admission never sees them."""
    differ, compared = {}, 0
    for name, body in PODS.items():
        message = admitted(plane, namespace, body)
        if " 422 " in message or " 400 " in message:
            continue
        compared += 1
        problems = violations(body, level)
        if ("violates PodSecurity" in message) != bool(problems):
            differ[name] = message, problems
    assert differ == {}
    assert compared >= 30


def test_each_way_to_say_the_user_is_admitted_at_the_level_that_it_fits(
    plane: ControlPlane, namespace: str
) -> None:
    """Workers and coordinator are valid, and admission refuses them only above their level."""
    levels = [Level.PRIVILEGED, Level.BASELINE, Level.RESTRICTED]
    differ = {}
    for level in levels:
        body = {"metadata": {"labels": {LABEL: str(level)}}}
        plane.api.patch(f"/api/v1/namespaces/{namespace}", body)
        for name, row in ROWS.items():
            job = read_job(row.body | {"metadata": {"name": "x", "uid": "0" * 8}})
            pods = (
                children.worker(job, 0, 1, key_id="k"),
                children.coordinator(job, 1, key_id="k"),
            )
            for pod in pods:
                pod["metadata"].pop("ownerReferences")
                message = admitted(plane, namespace, pod)
                fits = not violations(pod, level)
                if ("violates PodSecurity" in message) == fits or (fits and message):
                    differ[name, level, pod["metadata"]["name"]] = message
    assert differ == {}


def test_ephemeral_containers_are_refused_in_a_template(
    plane: ControlPlane, namespace: str
) -> None:
    row = ROWS["nothing"].body
    more = {"name": "debug", "image": "d", "securityContext": {"runAsUser": 0}}
    row["spec"]["template"]["spec"]["ephemeralContainers"] = [more]
    job = read_job(row | {"metadata": {"name": "x", "uid": "0" * 8}})
    pod = children.worker(job, 0, 1, key_id="k")
    pod["metadata"].pop("ownerReferences")
    assert "spec.ephemeralContainers" in admitted(plane, namespace, pod)
