"""The configuration files of a node's programs, with the reason beside each unusual setting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.cluster import images, network
from testing.cluster.control_plane import ControlPlane
from testing.cluster.prerequisites import CNI_PLUGINS

DNS_DOMAIN = "cluster.local"
# Name of the folder where a node mounts its own disk, invisible outside; see disks.py.
DISK = "disk"


@dataclass(frozen=True)
class NodeFiles:
    """Paths of a node's configuration files."""

    containerd: Path
    kubelet: Path
    kubelet_kubeconfig: Path
    kube_proxy: Path


def write(plane: ControlPlane, name: str, number: int, folder: Path) -> NodeFiles:
    """Write the configuration files of a node below `folder`."""
    pods = network.node_pod_range(plane.instance, number)
    cni = folder / "cni"
    cni.mkdir(exist_ok=True)
    (cni / "pods.conflist").write_text(json.dumps(_cni(pods, folder / DISK), indent=1))
    containerd = folder / "containerd.toml"
    containerd.write_text(_containerd(folder / DISK, cni))
    identity = plane.kubeconfig_of(f"system:node:{name}", "system:nodes")
    proxy_identity = plane.kubeconfig_of("system:kube-proxy")
    return NodeFiles(
        containerd=containerd,
        kubelet=_yaml(folder / "kubelet.yaml", _kubelet(plane, name, number, folder)),
        kubelet_kubeconfig=identity,
        kube_proxy=_yaml(
            folder / "kube-proxy.yaml", _kube_proxy(proxy_identity, name, plane.instance.pod_range)
        ),
    )


def _yaml(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def _containerd(disk: Path, cni: Path) -> str:
    return f"""version = 2
root = "{disk}/containerd"
# /run is the node's own.
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs"]

[plugins."io.containerd.internal.v1.opt"]
path = "{disk}/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{images.PAUSE}"
# Without CAP_SYS_RESOURCE every sandbox fails otherwise: "can't get final child's PID from pipe".
restrict_oom_score_adj = true
stream_server_address = "127.0.0.1"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{cni}"
"""


def _cni(pods: str, disk: Path) -> dict[str, Any]:
    """Return the CNI configuration, which gives each pod a point-to-point link.

    All traffic is routed, so Services work on the same node even where the kernel does not filter
    bridged packets.

    Args:
        pods: the node's range of pod addresses.
        disk: the node's own disk, which keeps the list of addresses in use.

    Returns:
        the configuration as JSON values.
    """
    addresses = {
        "type": "host-local",
        "dataDir": str(disk / "addresses"),
        "ranges": [[{"subnet": pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    wire = {"type": "ptp", "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [wire]}


def _kubelet(plane: ControlPlane, name: str, number: int, folder: Path) -> dict[str, Any]:
    address = network.node_address(plane.instance, number)
    pair = plane.authority.server(name, (address,))
    # The file is empty: the tests need no names outside of the cluster.
    resolver = folder / "resolv.conf"
    resolver.touch()
    nothing = dict.fromkeys(("memory.available", "nodefs.available", "imagefs.available"), "0%")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(plane.authority.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pair.certificate),
        "tlsPrivateKeyFile": str(pair.key),
        "clusterDNS": [plane.instance.dns_address],
        "clusterDomain": DNS_DOMAIN,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "resolvConf": str(resolver),
        "podLogsDir": str(folder / DISK / "pod-logs"),
        "volumePluginDir": str(folder / DISK / "volume-plugins"),
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{plane.instance.name}/{name}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        # The node shares the machine's disk, so how full that is must not evict pods.
        "evictionHard": nothing,
        "imageGCHighThresholdPercent": 100,
        # The node's lease is renewed each 3 s; the controller manager gives it up after 20 s.
        "nodeLeaseDurationSeconds": 12,
        "nodeStatusUpdateFrequency": "5s",
        "nodeStatusReportFrequency": "60s",
    }


def _kube_proxy(kubeconfig: Path, name: str, pods: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": name,
        "mode": "iptables",
        "clusterCIDR": pods,
        # These kernel settings belong to the host and may not be written here.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
