"""The wires between host and nodes: one bridge, a pair of devices for each node, routes to pods.

A node's end lies in the node's network namespace and goes with it; so do the routes on the host
when the bridge goes. The host's packet filter and forwarding are not touched: nodes reach each
other over the bridge, and pods on the nodes through the nodes' own routes.
"""

from __future__ import annotations

import subprocess

from testing.cluster import leftovers
from testing.cluster.instance import Instance

TIMEOUT_S = 60.0


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def node_address(room: Instance, number: int) -> str:
    return room.address(f"0.{10 + number}")


def node_pod_range(room: Instance, number: int) -> str:
    return room.address(f"{number}.0/24")


def make_bridge(room: Instance) -> None:
    run("ip", "link", "add", room.name, "type", "bridge")
    run("ip", "address", "add", f"{room.host_address}/24", "dev", room.name)
    run("ip", "link", "set", room.name, "up")


def connect(room: Instance, number: int, pid: int, nodes: int) -> None:
    """Give the network namespace of `pid` its address, and everybody the ways to its pods."""
    address, outside = node_address(room, number), f"{room.name}n{number}"
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net", "ip")
    # That of a node which was powered off just now may not be gone yet.
    leftovers.remove_link(outside)
    run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", outside, "master", room.name, "up")
    run(*inside, "link", "set", "lo", "up")
    run(*inside, "address", "add", f"{address}/24", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    run("ip", "route", "replace", node_pod_range(room, number), "via", address)
    for other in range(1, nodes + 1):
        if other != number:
            to, via = node_pod_range(room, other), node_address(room, other)
            run(*inside, "route", "add", to, "via", via)
