"""One real node: kubelet, containerd and kube-proxy in namespaces of their own.

A node is one process tree. The first process opens namespaces for processes, mounts, network and
host name, and the programs are started inside them. When that first process ends, the kernel ends
everything on the node, pods included, and drops all mounts, as a power cut does. The same happens
when the tests are killed. Control groups are shared with the host, since Kubernetes 1.34 on cgroup
v1 needs to see the whole hierarchy.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import IO

from testing.cluster import control_groups, disks, instance, network, node_config, programs
from testing.cluster.control_plane import ControlPlane
from testing.cluster.daemons import Daemon, DaemonError

KUBELET = "kubelet"
CONTAINERD = "containerd"
KUBE_PROXY = "kube-proxy"
START_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 180.0
"""How long a node may take to become ready while other tests use both cores."""
IMPORT_TIMEOUT_S = 300.0

_NAMESPACES = ("--mount", "--net", "--uts", "--ipc", "--pid")

# The first process sets up the namespaces, then acts as an init: it reaps orphans.
_INIT = f"""
set -eu
{disks.FORGET_OTHERS}
hostname "$2"
mount --make-rshared /
mount -o loop,noatime "$3/disk.img" "$3/disk"
mount --bind "$3/run" /run
mount --bind "$3/log" /var/log
echo 1 > /proc/sys/net/ipv4/ip_forward
touch "$3/up"
trap 'exit 0' TERM
while :; do sleep 3600 & wait $!; done
"""


class Node:
    """One node; after `boot` and `start` it runs pods; each of `programs` can be stopped alone."""

    def __init__(self, plane: ControlPlane, number: int, nodes: int) -> None:
        self.name = f"node{number}"
        self.number = number
        self.address = network.node_address(plane.instance, number)
        self._plane = plane
        self._nodes = nodes
        self._folder = plane.folder / self.name
        self._disk = self._folder / "disk.img"
        self._init: Daemon | None = None
        self.programs: dict[str, Daemon] = {}

    def boot(self) -> None:
        """Open the namespaces and start containerd without waiting for it."""
        room = self._plane.instance
        # The contents of /run do not survive a power cut.
        shutil.rmtree(self._folder / "run", ignore_errors=True)
        for name in ("run", "log", node_config.DISK):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        disks.make(self._disk)
        (self._folder / "up").unlink(missing_ok=True)
        control_groups.make(f"{room.name}/{self.name}")
        unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        others = instance.base_folder()
        script = ["bash", "-c", _INIT, "init", str(others), self.name, str(self._folder)]
        self._init = self._daemon("init", *unshare, *script)
        self._init.start()
        self._init.wait_until((self._folder / "up").exists, "up", START_TIMEOUT_S)
        network.connect(room, self.number, self._init.pid, self._nodes)
        files = node_config.write(self._plane, self.name, self.number, self._folder)
        self.programs = {
            CONTAINERD: self._inside(CONTAINERD, "containerd", f"--config={files.containerd}"),
            KUBELET: self._inside(
                KUBELET,
                programs.require(KUBELET),
                f"--config={files.kubelet}",
                f"--kubeconfig={files.kubelet_kubeconfig}",
                f"--root-dir={self._folder / node_config.DISK / 'kubelet'}",
                f"--node-ip={self.address}",
            ),
            KUBE_PROXY: self._inside(
                KUBE_PROXY, programs.require(KUBE_PROXY), f"--config={files.kube_proxy}"
            ),
        }
        self.programs[CONTAINERD].start()

    def start(self, archives: list[Path]) -> None:
        """Load the images and start kubelet and kube-proxy; `wait_ready` waits for the node."""
        socket = self._folder / "run" / "containerd" / "containerd.sock"
        self.programs[CONTAINERD].wait_until(socket.exists, "listening", START_TIMEOUT_S)
        for archive in archives:
            self.load(archive)
        self.programs[KUBELET].start()
        self.programs[KUBE_PROXY].start()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait for the node; restart a program that exits, as a node's init system would."""
        path = f"/api/v1/nodes/{self.name}"
        deadline = time.monotonic() + timeout_s
        ended: list[str] = []
        while True:
            nodes = [
                node
                for node in self._plane.api.items("/api/v1/nodes")
                if node["metadata"]["name"] == self.name
            ]
            if nodes and _is_ready(nodes[0]) and not nodes[0]["spec"].get("taints"):
                return
            for program in self.programs.values():
                if not program.alive:
                    ended.append(f"{program.name} had ended:\n{program.log_tail()}")
                    program.start()
            if time.monotonic() > deadline:
                tails = [program.log_tail() for program in self.programs.values()]
                status = [node["status"].get("conditions") for node in nodes]
                logs = "\n".join([*ended, *tails])
                raise DaemonError(f"{path} not ready within {timeout_s} s: {status}\n{logs}")
            time.sleep(0.5)

    def load(self, archive: Path) -> None:
        """Import the images of a docker or OCI archive, for pods with imagePullPolicy Never."""
        # The archive goes through stdin, since the node may not see the archive's folder.
        with archive.open("rb") as content:
            self._run(
                ["ctr", "--namespace=k8s.io", "images", "import", "-"], content, IMPORT_TIMEOUT_S
            )

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """Run a command on this node as root and return what it prints."""
        return self._run(list(command), subprocess.DEVNULL, timeout_s)

    def _run(self, command: list[str], stdin: int | IO[bytes], timeout_s: float) -> str:
        done = subprocess.run(
            [*self._entering(), *command],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def power_off(self) -> None:
        """End everything on the node at once, like a power cut; `boot` and `start` restore it."""
        if self._init is not None:
            self._init.kill()
            for program in self.programs.values():
                program.kill()
            disks.wait_released(self._disk)

    def _inside(self, name: str, *command: str | Path) -> Daemon:
        return self._daemon(name, *self._entering(), *command, forks=True)

    def _entering(self) -> list[str]:
        assert self._init is not None, f"{self.name} is not booted"
        return ["nsenter", f"--target={self._init.pid}", *_NAMESPACES, "--"]

    def _daemon(self, name: str, *command: str | Path, forks: bool = True) -> Daemon:
        log = self._plane.folder / "logs" / f"{self.name}-{name}.log"
        joining = control_groups.joining(self._plane.instance.name)
        return Daemon(f"{name} of {self.name}", [*joining, *command], log, forks=forks)


def _is_ready(node: dict[str, object]) -> bool:
    status = node["status"]
    assert isinstance(status, dict), node
    return any(
        one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ())
    )
