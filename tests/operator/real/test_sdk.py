"""The SDK against a real API server: `train` creates objects, which go when the job goes.

Nodes are fake, so no function runs. Pods and the ConfigMap with the function are real.
"""

from __future__ import annotations

import pytest
from kubernetes.client import V1Container, V1PodSpec, V1PodTemplateSpec
from paceline.client import JobClient, Metadata, TrainingJob, TrainingJobSpec
from paceline.jobs.errors import NameTakenError, NoSuchJobError, NotAllowedError

from testing.cluster.api import ApiError
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import Running, pods, until
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes


def train(epochs: int) -> int:
    return epochs


def config_maps(plane: ControlPlane, namespace: str) -> list[str]:
    maps = plane.api.items(f"/api/v1/namespaces/{namespace}/configmaps")
    return [one["metadata"]["name"] for one in maps if "-function-" in one["metadata"]["name"]]


def client_of(plane: ControlPlane, namespace: str, user: str, *groups: str) -> JobClient:
    return JobClient.from_kubeconfig(plane.kubeconfig_of(user, *groups), namespace=namespace)


def test_a_function_is_mounted_in_pods_and_deleted_with_its_job(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    client = client_of(plane, namespace, "anna", "system:masters")
    with plane.fake_nodes(3), Fleet(plane, namespace) as fleet:
        job = client.train(train, arguments={"epochs": 3}, name="sent", replicas=2, image="none")
        assert job.wait("training", timeout_s=60, progress=False).ready == 2
        (carrier,) = config_maps(plane, namespace)
        stored = plane.api.get(f"/api/v1/namespaces/{namespace}/configmaps/{carrier}")
        assert "train(**{'epochs': 3})" in stored["data"]["function.py"]
        for pod in pods(plane, namespace):
            mounts = pod["spec"]["containers"][0]["volumeMounts"]
            paths = {mount["mountPath"]: mount["name"] for mount in mounts}
            assert paths["/run/paceline/function"] == "paceline-function"

        with pytest.raises(NameTakenError, match="already a job sent"):
            client.train(train, arguments={"epochs": 3}, name="sent")
        assert job.scale(3) == 2
        until(lambda: job.status().ready == 3, "3 replicas")
        fleet.finish("sent")
        assert job.wait(timeout_s=60, progress=False).state == "Complete"
        assert list(job.rounds()["state"])[-1] == "Complete"
        job.delete(wait_s=60)
        with pytest.raises(NoSuchJobError):
            client.get_job("sent")
        until(lambda: not config_maps(plane, namespace), "the ConfigMap is collected")


def test_a_typed_job_accepts_a_kubernetes_pod_template(plane: ControlPlane, namespace: str) -> None:
    client = client_of(plane, namespace, "anna", "system:masters")
    trainer = V1Container(name="trainer", image="none", command=["python", "train.py"])
    spec = TrainingJobSpec(template=V1PodTemplateSpec(spec=V1PodSpec(containers=[trainer])))
    client.submit(TrainingJob(metadata=Metadata(name="typed"), spec=spec))
    assert [job.name for job in client.list_jobs()] == ["typed"]
    client.delete_job("typed")


def test_a_user_without_rights_leaves_nothing_behind(plane: ControlPlane, namespace: str) -> None:
    """With rights to jobs but not to ConfigMaps the call fails, and no job waits for one."""
    with pytest.raises(NotAllowedError, match="trainingjobs"):
        client_of(plane, namespace, "nobody").train(train, arguments={"epochs": 1}, name="none")
    rules = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    plane.api.create(
        f"{rules}/roles",
        {
            "metadata": {"name": "jobs-only"},
            "rules": [
                {"apiGroups": ["paceline.dev"], "resources": ["trainingjobs"], "verbs": ["*"]}
            ],
        },
    )
    plane.api.create(
        f"{rules}/rolebindings",
        {
            "metadata": {"name": "jobs-only"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "jobs-only",
            },
            "subjects": [
                {"kind": "User", "name": "ben", "apiGroup": "rbac.authorization.k8s.io"}
            ],
        },
    )  # fmt: skip
    ben = client_of(plane, namespace, "ben")
    with pytest.raises(NotAllowedError, match="configmaps"):
        until(lambda: ben.train(train, arguments={"epochs": 1}, name="half"), "rights are in force")
    with pytest.raises(ApiError):
        plane.api.get(f"/apis/paceline.dev/v1alpha1/namespaces/{namespace}/trainingjobs/half")
