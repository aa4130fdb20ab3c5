"""The two test nodes run real pods, pods reach each other, and teardown leaves nothing behind."""

from __future__ import annotations

import sys

import pytest

from testing.cluster import leftovers, running
from testing.cluster.api import Json
from testing.cluster.commands import kubectl
from testing.cluster.host_python import PYTHON, with_host_python
from testing.cluster.images import BUSYBOX
from testing.cluster.nodes import Cluster

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]
POD_TIMEOUT_S = 60.0


def pods(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")


def shell_pod(name: str, script: str, node: str = "") -> Json:
    container = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "ports": [{"containerPort": 8080}],
    }
    spec: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def wait_phase(cluster: Cluster, namespace: str, name: str, phase: str) -> Json:
    return cluster.api.wait(
        pods(namespace, name), lambda pod: pod["status"]["phase"] == phase, POD_TIMEOUT_S, phase
    )


SERVE = "echo hello from $(hostname) > /tmp/index.html; httpd -f -p 8080 -h /tmp"


@pytest.fixture
def served(cluster: Cluster, cluster_namespace: str) -> str:
    """Start a pod on each node that serves port 8080, behind a headless and an ordinary Service."""
    for node in cluster.nodes:
        cluster.api.create(pods(cluster_namespace), shell_pod(node.name, SERVE, node.name))
    services = f"/api/v1/namespaces/{cluster_namespace}/services"
    port = {"port": 80, "targetPort": 8080}
    for node in cluster.nodes:
        spec = {"selector": {"app": node.name}, "ports": [port]}
        cluster.api.create(services, {"metadata": {"name": f"to-{node.name}"}, "spec": spec})
        headless = {"clusterIP": "None", "selector": {"app": node.name}}
        cluster.api.create(services, {"metadata": {"name": node.name}, "spec": headless})
    for node in cluster.nodes:
        pod = wait_phase(cluster, cluster_namespace, node.name, "Running")
        assert pod["spec"]["nodeName"] == node.name
    return cluster_namespace


def test_pods_reach_each_other_by_name(cluster: Cluster, served: str) -> None:
    """Each pod reaches both pods by headless name and by Service, also on its own node."""
    for source in cluster.nodes:
        for target in cluster.nodes:
            for url in (f"http://{target.name}:8080", f"http://to-{target.name}.{served}"):
                # A name resolves once its endpoints exist, a moment after the pod is ready.
                fetch = (
                    f"for try in 1 2 3 4 5 6 7 8 9 10; do wget -qO- {url} && exit; sleep 1; done"
                )
                output = kubectl(
                    cluster.kubeconfig, "-n", served, "exec", source.name, "--", "sh", "-c", fetch
                )
                assert output.strip() == f"hello from {target.name}", (source.name, url)


def test_pods_reach_the_api_server(cluster: Cluster, cluster_namespace: str) -> None:
    """A pod connects to the Service of the API server and has a token mounted."""
    script = (
        "cd /var/run/secrets/kubernetes.io/serviceaccount;"
        "nc -w 5 kubernetes.default.svc.cluster.local 443 < /dev/null && test -s token && echo yes"
    )
    cluster.api.create(pods(cluster_namespace), shell_pod("asker", script))
    wait_phase(cluster, cluster_namespace, "asker", "Succeeded")
    assert kubectl(cluster.kubeconfig, "-n", cluster_namespace, "logs", "asker").strip() == "yes"


def test_exit_codes_and_logs_of_pods_are_reported(cluster: Cluster, cluster_namespace: str) -> None:
    cluster.api.create(pods(cluster_namespace), shell_pod("fails", "echo why; exit 7"))
    pod = wait_phase(cluster, cluster_namespace, "fails", "Failed")
    state = pod["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["exitCode"] == 7
    assert cluster.api.text(pods(cluster_namespace, "fails") + "/log").strip() == "why"


def test_pods_can_run_the_hosts_python(cluster: Cluster, cluster_namespace: str) -> None:
    """Pods have the packages of the test environment, mounted read-only."""
    program = (
        "import sys, aiohttp; print(sys.version)\n"
        "try: open(aiohttp.__file__, 'a')\n"
        "except OSError as error: print(error.strerror)"
    )
    container = {"name": "main", "command": [PYTHON, "-c", program]}
    spec = with_host_python({"restartPolicy": "Never", "containers": [container]})
    cluster.api.create(pods(cluster_namespace), {"metadata": {"name": "python"}, "spec": spec})
    wait_phase(cluster, cluster_namespace, "python", "Succeeded")
    lines = cluster.api.text(pods(cluster_namespace, "python") + "/log").splitlines()
    assert lines == [*sys.version.splitlines(), "Read-only file system"]


@pytest.mark.exhaustive
def test_a_node_runs_pods_again_after_a_power_loss(
    cluster: Cluster, cluster_namespace: str
) -> None:
    node = cluster.node("node2")
    try:
        node.power_off()
        assert not any(program.alive for program in node.programs.values())
        path = f"/api/v1/nodes/{node.name}"
        cluster.api.wait(path, lambda it: bool(it["spec"].get("taints")), 60, "given up")
    finally:
        cluster.restart(node)
    cluster.api.create(pods(cluster_namespace), shell_pod("after", "echo back", node.name))
    wait_phase(cluster, cluster_namespace, "after", "Succeeded")


def test_teardown_leaves_nothing() -> None:
    with running.two_nodes() as cluster:
        room = cluster.control_plane.instance
        assert len(leftovers.control_groups(room.name)) > 3
        assert len(leftovers.processes(room.name)) > 10
        assert leftovers.links(room.name) == [room.name]
    assert leftovers.control_groups(room.name) == []
    assert leftovers.links(room.name) == []
    assert leftovers.mounts_below(room.folder) == []
    assert not room.folder.exists()
