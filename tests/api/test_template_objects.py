"""A pod template built from classes of the `kubernetes` package equals the same one in YAML."""

from __future__ import annotations

from kubernetes import client
from paceline_api.reading.load import parse_job
from paceline_api.types.job import Metadata, TrainingJob, TrainingJobSpec

YAML = """
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata:
  name: same
spec:
  replicas: 2
  template:
    metadata:
      labels: {team: vision}
    spec:
      nodeSelector: {disk: ssd}
      tolerations:
        - {key: gpu, operator: Exists}
      containers:
        - name: trainer
          image: mine:1
          command: [python, train.py]
          env:
            - {name: LEVEL, value: "3"}
            - {name: SECRET, valueFrom: {secretKeyRef: {name: s, key: k}}}
          resources:
            limits: {nvidia.com/gpu: "1"}
"""


def test_kubernetes_objects_and_yaml_give_the_same_job() -> None:
    secret = client.V1SecretKeySelector(name="s", key="k")
    container = client.V1Container(
        name="trainer",
        image="mine:1",
        command=["python", "train.py"],
        env=[
            client.V1EnvVar(name="LEVEL", value="3"),
            client.V1EnvVar(name="SECRET", value_from=client.V1EnvVarSource(secret_key_ref=secret)),
        ],
        resources=client.V1ResourceRequirements(limits={"nvidia.com/gpu": "1"}),
    )
    template = client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels={"team": "vision"}),
        spec=client.V1PodSpec(
            containers=[container],
            node_selector={"disk": "ssd"},
            tolerations=[client.V1Toleration(key="gpu", operator="Exists")],
        ),
    )
    job = TrainingJob(
        metadata=Metadata(name="same"), spec=TrainingJobSpec(replicas=2, template=template)
    )
    assert job.to_mapping() == parse_job(YAML).to_mapping()
    assert job.spec.trainer() == parse_job(YAML).spec.trainer()
