"""Start and stop the fake kubelet, and make its pods end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testing.cluster import fake_kubelet, leftovers
from testing.cluster.api import Api
from testing.cluster.daemons import Daemon

READY_TIMEOUT_S = 60.0
ROOT = Path(__file__).parent.parent.parent


class FakeNodes:
    """The nodes fake-0, fake-1, ..., which exist between `start` and `stop`.

    When run as root, the addresses of their pods all lead to this machine: a server that listens on
    all addresses answers for every pod, as a stub of a coordinator may.
    """

    def __init__(
        self,
        api: Api,
        kubeconfig: Path,
        log: Path,
        *,
        nodes: int,
        pods_per_node: int,
        pod_range: str,
        device: str,
    ) -> None:
        self.names = [f"fake-{number}" for number in range(nodes)]
        self._api = api
        self._pod_range = pod_range
        self._device = device
        command = [
            sys.executable,
            "-m",
            "testing.cluster.fake_kubelet",
            f"--kubeconfig={kubeconfig}",
        ]
        command += [f"--nodes={','.join(self.names)}", f"--pods-per-node={pods_per_node}"]
        command += [f"--pod-range={pod_range}"]
        self.daemon = Daemon("fake-kubelet", command, log, {"PYTHONPATH": str(ROOT)})

    def start(self) -> None:
        """Start the fake kubelet and wait until all nodes are ready."""
        if os.geteuid() == 0:
            _ip("link", "add", self._device, "type", "bridge")
            _ip("link", "set", self._device, "up")
            _ip("route", "add", "local", self._pod_range, "dev", self._device)
        self.daemon.start()
        self.daemon.wait_until(self._all_untainted, "all nodes ready", READY_TIMEOUT_S)

    def stop(self) -> None:
        """Stop the fake kubelet and delete its nodes and its network device."""
        self.daemon.stop()
        for name in self.names:
            self._api.delete(f"/api/v1/nodes/{name}")
        leftovers.remove_link(self._device)

    def end_pod(self, namespace: str, name: str, exit_code: int = 0) -> None:
        """End the containers of a pod with this exit code."""
        self._tell(namespace, name, str(exit_code))

    def evict_pod(self, namespace: str, name: str) -> None:
        """Evict a pod, as a kubelet that is short of memory does."""
        self._tell(namespace, name, fake_kubelet.EVICTED)

    def _tell(self, namespace: str, name: str, end: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        annotations = {fake_kubelet.EXIT_CODE: end}
        self._api.patch(path, {"metadata": {"annotations": annotations}})

    def _all_untainted(self) -> bool:
        ready = {
            node["metadata"]["name"]
            for node in self._api.items("/api/v1/nodes")
            if not node["spec"].get("taints")
        }
        return ready >= set(self.names)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)
