"""Network between host and nodes: one bridge, a veth pair for each node, and routes to the pods.

A node's end lies in the node's network namespace and is deleted with it. The routes on the host are
deleted with the bridge. The host's packet filter and forwarding are not changed: nodes reach each
other over the bridge, and pods on the nodes through the nodes' own routes.
"""

from __future__ import annotations

import subprocess

from testing.cluster import leftovers
from testing.cluster.instance import Instance

TIMEOUT_S = 60.0


def run(*words: str) -> None:
    """Run a command and raise RuntimeError with its stderr if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def node_address(room: Instance, number: int) -> str:
    """Return the address of a node on the bridge."""
    return room.address(f"0.{10 + number}")


def node_pod_range(room: Instance, number: int) -> str:
    """Return the range of addresses of a node's pods."""
    return room.address(f"{number}.0/24")


def make_bridge(room: Instance) -> None:
    """Create the cluster's bridge with the host's address on it."""
    run("ip", "link", "add", room.name, "type", "bridge")
    run("ip", "address", "add", f"{room.host_address}/24", "dev", room.name)
    run("ip", "link", "set", room.name, "up")


def connect(room: Instance, number: int, pid: int, nodes: int) -> None:
    """Connect the network namespace of `pid` to the bridge and add the routes to its pods."""
    address, outside = node_address(room, number), f"{room.name}n{number}"
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net", "ip")
    # The device of a node that was powered off just now may still exist.
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
