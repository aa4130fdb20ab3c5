"""A cluster with real nodes: control plane, nodes, DNS, images."""

from __future__ import annotations

from pathlib import Path

from testing.cluster import cluster_dns, images, network, programs
from testing.cluster.api import Api
from testing.cluster.control_plane import ControlPlane
from testing.cluster.instance import Instance
from testing.cluster.node import Node

NODES = 2


class Cluster:
    """Kubernetes with two nodes; `control_plane` has users, namespaces and programs."""

    def __init__(self, room: Instance, *, audit: bool = True) -> None:
        self.control_plane = ControlPlane(room, address=room.host_address, audit=audit)
        self.nodes = [Node(self.control_plane, number, NODES) for number in range(1, NODES + 1)]

    @property
    def api(self) -> Api:
        """Client of the API server as an administrator."""
        return self.control_plane.api

    @property
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""
        return self.control_plane.kubeconfig

    def node(self, name: str) -> Node:
        """Return the node with this name."""
        return next(node for node in self.nodes if node.name == name)

    def start(self) -> None:
        """Start control plane and nodes with the system images and DNS, and wait until ready."""
        network.make_bridge(self.control_plane.instance)
        for node in self.nodes:
            node.boot()
        self.control_plane.start()
        folder = self.control_plane.folder / "images"
        folder.mkdir()
        archives = [
            image.write(folder / f"{number}.tar")
            for number, image in enumerate(images.system_images(programs.require("coredns")))
        ]
        for node in self.nodes:
            node.start(archives)
        cluster_dns.install(self.control_plane)
        for node in self.nodes:
            node.wait_ready()
        cluster_dns.wait_ready(self.control_plane, len(self.nodes))

    def stop(self) -> None:
        """Power off the nodes and stop the control plane."""
        for node in self.nodes:
            node.power_off()
        self.control_plane.stop()

    def load_image(self, archive: Path) -> None:
        """Import the images of a docker or OCI archive on every node."""
        for node in self.nodes:
            node.load(archive)

    def restart(self, node: Node) -> None:
        """Bring back a node that was powered off and wait until it is ready; it keeps its pods."""
        node.boot()
        node.start([])
        node.wait_ready()
