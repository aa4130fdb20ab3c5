"""Paceline on the two-node cluster, installed as a user does: images, charts, operator pod."""

from __future__ import annotations

import time
from pathlib import Path

from scripts import version
from testing.cluster import host_python
from testing.cluster.api import ApiError, Json
from testing.cluster.commands import helm, kubectl
from testing.cluster.image_build import ImageBuilder
from testing.cluster.nodes import Cluster

CHECKOUT = host_python.CHECKOUT
SYSTEM = "paceline-system"
OPERATOR = "paceline-operator"
OPERATOR_IMAGE = f"paceline/operator:{version.current()}"
WORKER_IMAGE = "paceline.test/worker:1"
INSTALL_TIMEOUT = "180s"


class Platform:
    """A cluster with Paceline installed."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.api = cluster.api

    def load_images(self, builder: ImageBuilder) -> None:
        """Build and load the operator's image, and the image of the jobs on top of it."""
        operator = builder.build(
            OPERATOR_IMAGE,
            context=CHECKOUT,
            dockerfile=CHECKOUT / "Dockerfile",
            target="operator",
            arguments={"BASE": builder.base()},
        )
        self.cluster.load_image(operator)
        here = Path(__file__).parent
        worker = builder.build(
            WORKER_IMAGE,
            context=here,
            dockerfile=here / "worker.Dockerfile",
            arguments={"OPERATOR": OPERATOR_IMAGE},
        )
        self.cluster.load_image(worker)

    def install(self) -> None:
        charts, wait = CHECKOUT / "charts", ("--wait", "--timeout", INSTALL_TIMEOUT)
        self.helm("install", "paceline-crds", str(charts / "paceline-crds"), *wait)
        where = ("--namespace", SYSTEM, "--create-namespace")
        self.helm("install", "paceline", str(charts / "paceline"), *where, *wait)

    def helm(self, *words: str) -> str:
        return helm(self.cluster.kubeconfig, *words, timeout_s=300.0)

    def kubectl(self, *words: str, stdin: str = "", timeout_s: float = 120.0) -> str:
        return kubectl(self.cluster.kubeconfig, *words, stdin=stdin, timeout_s=timeout_s)

    # ---- the operator -----------------------------------------------------------------------

    def operator_pods(self) -> list[Json]:
        pods = self.api.items(
            f"/api/v1/namespaces/{SYSTEM}/pods", labels="app.kubernetes.io/component=operator"
        )
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def operator_logs(self) -> str:
        """Return the logs of all operator pods; a pod on an unreachable node has none to show."""
        path, logs = f"/api/v1/namespaces/{SYSTEM}/pods", []
        for pod in self.api.items(path, labels="app.kubernetes.io/component=operator"):
            name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "nowhere")
            try:
                text = self.api.text(f"{path}/{name}/log?tailLines=400")
            except ApiError as error:
                text = f"no log: {error}"
            logs.append(f"---- {name} on {node}\n{text}")
        return "\n".join(logs)

    def scale_operator(self, replicas: int) -> None:
        """Scale the operator, and wait until all its pods are ready or none is left."""
        self.kubectl("-n", SYSTEM, "scale", f"deployment/{OPERATOR}", f"--replicas={replicas}")
        deadline = time.monotonic() + 120
        path = f"/api/v1/namespaces/{SYSTEM}/pods"
        while True:
            pods = self.api.items(path, labels="app.kubernetes.io/component=operator")
            ready = [pod for pod in pods if _is_ready(pod)]
            if len(pods) == replicas == len(ready):
                return
            assert time.monotonic() < deadline, f"{replicas} operators wanted: {pods}"
            time.sleep(0.2)


def _is_ready(pod: Json) -> bool:
    return any(
        one["type"] == "Ready" and one["status"] == "True"
        for one in pod["status"].get("conditions", ())
    )
