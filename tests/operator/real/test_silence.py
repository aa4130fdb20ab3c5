"""Watches that die silently: the connections stay open, and nothing comes through anymore."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline_operator.cluster.observe import SILENCE_S

from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import Running, change, holder, living, submit, until
from testing.fake_cluster.proxy import Proxy
from testing.fake_cluster.stub import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

BOUND_S = SILENCE_S + 30
"""How long a dead watch may go unnoticed. The API server sends a sign of life about once a minute,
and a longer silence ends a watch."""


@pytest.fixture
def proxy(plane: ControlPlane) -> Iterator[Proxy]:
    with Proxy(plane.url) as local_proxy:
        yield local_proxy


@pytest.fixture
def through(plane: ControlPlane, namespace: str, proxy: Proxy, tmp_path: Path) -> Iterator[Running]:
    """Run an operator that reaches its API server only through the proxy."""
    running = Running(plane, namespace, tmp_path / "operator.log")
    kubeconfig = proxy.kubeconfig(plane.kubeconfig_of(running.user, "system:masters"))
    try:
        running.started(kubeconfig=kubeconfig)
        yield running
    finally:
        running.end()


def metric(operator: Running, name: str) -> float:
    address = f"http://127.0.0.1:{operator.port}/metrics"
    with urllib.request.urlopen(address, timeout=5) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_cut_connections_are_reestablished(
    plane: ControlPlane, namespace: str, proxy: Proxy, through: Running
) -> None:
    with plane.fake_nodes(1), Fleet(plane, namespace):
        submit(plane, namespace, replicas=2)
        until(lambda: len(living(plane, namespace)) == 2, "2 workers")
        proxy.cut()
        plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/digits-1-1")
        until(lambda: "digits-1-2" in living(plane, namespace), "a replacement", 20)
        proxy.cut()
        change(plane, namespace, replicas=3)
        until(lambda: len(living(plane, namespace)) == 3, "3 workers", 30)


@pytest.mark.exhaustive
def test_a_silently_dead_watch_is_restarted(
    plane: ControlPlane, namespace: str, proxy: Proxy, through: Running
) -> None:
    with plane.fake_nodes(1), Fleet(plane, namespace):
        submit(plane, namespace, "before", replicas=2)
        until(lambda: len(living(plane, namespace)) == 2, "2 workers")
        restarts = metric(through, "paceline_operator_watch_restarts_total")
        proxy.stall()
        stalled_s = time.monotonic()
        plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/before-1-1")
        submit(plane, namespace, "after", replicas=2)
        until(lambda: "after-1-1" in living(plane, namespace), "the new job", BOUND_S)
        jobs_s = time.monotonic() - stalled_s
        until(lambda: "before-1-2" in living(plane, namespace), "a replacement", BOUND_S - jobs_s)
        assert metric(through, "paceline_operator_watch_restarts_total") > restarts
        assert holder(plane, namespace) == "one", "it has lost its Lease"
        assert through.process is not None
        assert through.process.poll() is None
