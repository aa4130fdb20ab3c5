"""The TrainingJob that `train` builds from its arguments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client as k8s
from paceline.client.making import COMMAND, function_job
from paceline.jobs.core.carried import config_map, with_function
from paceline.jobs.core.script_job import default_image, job_name
from paceline_api.errors import InvalidJobError, SpecError
from paceline_api.names import JOB_NAME_MAX
from paceline_api.reading.load import job_from_mapping
from paceline_api.types.collective import Collective
from paceline_api.types.job import TrainingJob


def made(**given: Any) -> TrainingJob:
    words: dict[str, Any] = {"replicas": 2, "template": None, "image": None}
    words |= {"env": {}, "resources": {}, "spec": {}, **given}
    return function_job("job", **words)


def trainer(job: TrainingJob) -> dict[str, Any]:
    container: dict[str, Any] = job.to_mapping()["spec"]["template"]["spec"]["containers"][0]
    return container


def test_a_job_without_a_template_gets_the_default_image_and_command() -> None:
    job = made(env={"A": "1"}, resources={"nvidia.com/gpu": 1, "memory": "4Gi"})
    assert job.spec.replicas == 2
    assert trainer(job) == {
        "name": "trainer",
        "image": default_image(),
        "command": COMMAND,
        "env": [{"name": "A", "value": "1"}],
        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "4Gi"}},
    }


def test_a_pod_template_keeps_its_own_fields() -> None:
    container = k8s.V1Container(
        name="trainer", image="mine:1", env=[k8s.V1EnvVar(name="A", value="1")]
    )
    side = k8s.V1Container(name="side", image="other")
    template = k8s.V1PodTemplateSpec(
        spec=k8s.V1PodSpec(containers=[container, side], node_selector={"disk": "ssd"})
    )
    job = made(template=template, env={"B": "2"})
    assert trainer(job)["image"] == "mine:1"
    assert [one["name"] for one in trainer(job)["env"]] == ["A", "B"]
    pod = job.to_mapping()["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"disk": "ssd"}
    assert "command" not in pod["containers"][1]


def test_a_template_given_as_a_mapping_is_not_modified() -> None:
    template = {"spec": {"containers": [{"name": "trainer", "image": "mine:1"}]}}
    assert trainer(made(template=template, image="mine:2"))["image"] == "mine:2"
    assert template == {"spec": {"containers": [{"name": "trainer", "image": "mine:1"}]}}


def test_a_trainer_with_its_own_command_is_refused() -> None:
    template = {"spec": {"containers": [{"name": "trainer", "command": ["python"]}]}}
    with pytest.raises(SpecError, match="the function is what the trainer runs"):
        made(template=template)


def test_spec_fields_can_be_set_and_unknown_ones_are_refused() -> None:
    job = made(spec={"min_replicas": 1, "collective": Collective(max_age=0), "suspend": True})
    assert job.spec.min_replicas == 1
    assert job.spec.collective is not None
    assert job.spec.collective.max_age == 0
    assert made(spec={"collective": {"maxAge": 0}}).spec.collective == job.spec.collective
    with pytest.raises(InvalidJobError, match="minReplica") as caught:
        made(spec={"min_replica": 1})
    assert caught.value.hint == "did you mean minReplicas?"


def test_a_template_without_a_trainer_container_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="no container named trainer"):
        made(template={"spec": {"containers": [{"name": "main"}]}})


@pytest.mark.long
@given(function=st.text(min_size=1), suffix=st.text("0123456789abcdef", min_size=5, max_size=5))
def test_every_function_name_gives_a_valid_job_name(function: str, suffix: str) -> None:
    name = job_name(function, suffix)
    assert len(name) <= JOB_NAME_MAX
    mapping = made().to_mapping() | {"metadata": {"name": name}}
    assert job_from_mapping(mapping).metadata.name == name


def test_in_a_cluster_the_function_is_mounted_from_a_config_map() -> None:
    job = made().to_mapping()
    result = with_function(job, "job-function-1")
    assert "volumes" not in job["spec"]["template"]["spec"], "what was given stays"
    pod = result["spec"]["template"]["spec"]
    assert pod["volumes"] == [
        {"name": "paceline-function", "configMap": {"name": "job-function-1"}}
    ]
    assert pod["containers"][0]["volumeMounts"] == [
        {"name": "paceline-function", "mountPath": "/run/paceline/function", "readOnly": True}
    ]
    result["metadata"]["uid"] = "u"
    kept = config_map("job-function-1", result, {"function.py": "x"})
    assert kept["metadata"]["ownerReferences"][0]["uid"] == "u", "it goes with the job"
    assert (kept["data"], kept["immutable"]) == ({"function.py": "x"}, True)
