"""The test control plane is Kubernetes without nodes, and its teardown leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from testing.cluster import instance, leftovers, programs, running
from testing.cluster.api import Api, ApiError
from testing.cluster.audit import requests_of
from testing.cluster.commands import CommandError, helm, kubectl
from testing.cluster.control_plane import API_SERVER, ControlPlane

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parent.parent.parent
POD = {
    "metadata": {"name": "one"},
    "spec": {"containers": [{"name": "trainer", "image": "none"}]},
}


def pods(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")


def test_the_api_server_reports_the_pinned_version(api_server: ControlPlane) -> None:
    assert api_server.api.get("/version")["gitVersion"] == programs.KUBERNETES


def test_rbac_denies_requests_until_a_role_allows_them(
    api_server: ControlPlane, namespace: str
) -> None:
    """A service account may do nothing until a role allows it; its token is a real one."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    api_server.api.create(accounts, {"metadata": {"name": "reader"}})
    reader = Api(api_server.kubeconfig_of_account(namespace, "reader"))
    with pytest.raises(ApiError, match="cannot list resource"):
        reader.items(pods(namespace))
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    api_server.api.create(f"{rbac}/roles", {"metadata": {"name": "read"}, "rules": [rule]})
    binding = {
        "metadata": {"name": "read"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "read"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
    }
    api_server.api.create(f"{rbac}/rolebindings", binding)
    assert reader.items(pods(namespace)) == []
    stranger = Api(api_server.kubeconfig_of("stranger"))
    with pytest.raises(ApiError, match="stranger"):
        stranger.items(pods(namespace))


def test_fake_pods_go_through_the_phases_of_real_pods(
    api_server: ControlPlane, namespace: str
) -> None:
    """Pods are scheduled, become ready with an address, end with an exit code, and are deleted."""
    api = api_server.api
    with api_server.fake_nodes(2) as fake:
        for name in ("one", "two", "three"):
            api.create(pods(namespace), POD | {"metadata": {"name": name}})
        for name in ("one", "two", "three"):
            pod = api.wait(pods(namespace, name), lambda it: it["status"]["phase"] == "Running", 20)
            assert pod["spec"]["nodeName"] in fake.names
            assert pod["status"]["containerStatuses"][0]["ready"]
        addresses = {pod["status"]["podIP"] for pod in api.items(pods(namespace))}
        assert len(addresses) == 3
        fake.end_pod(namespace, "one")
        fake.end_pod(namespace, "two", exit_code=3)
        api.wait(pods(namespace, "one"), lambda it: it["status"]["phase"] == "Succeeded", 20)
        two = api.wait(pods(namespace, "two"), lambda it: it["status"]["phase"] == "Failed", 20)
        state = two["status"]["containerStatuses"][0]["state"]
        assert state["terminated"]["exitCode"] == 3
        api.delete(pods(namespace, "three"))
        api.wait_gone(pods(namespace, "three"), 20)


def test_the_audit_log_counts_requests_by_user(api_server: ControlPlane, namespace: str) -> None:
    writer = Api(api_server.kubeconfig_of("writer", "system:masters"))
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    for name in ("a", "b"):
        writer.create(maps, {"metadata": {"name": name}})
    writer.patch(f"{maps}/a", {"data": {"x": "y"}})
    writer.delete(f"{maps}/b")
    assert api_server.audit_log is not None
    assert requests_of(api_server.audit_log, user="writer") == {
        ("create", "configmaps"): 2,
        ("patch", "configmaps"): 1,
        ("delete", "configmaps"): 1,
    }


def test_kubectl_and_helm_work_with_the_api_server(
    api_server: ControlPlane, namespace: str
) -> None:
    """Install, list and remove a chart of one object, as a user does."""
    chart = api_server.folder / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: small\nversion: 0.1.0\n")
    template = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}\n"
    (chart / "templates" / "map.yaml").write_text(template)
    helm(api_server.kubeconfig, "install", "mine", str(chart), "--namespace", namespace)
    listed = ("--namespace", namespace, "get", "configmaps", "--output", "name")
    assert "configmap/mine" in kubectl(api_server.kubeconfig, *listed).split()
    helm(api_server.kubeconfig, "uninstall", "mine", "--namespace", namespace)
    assert "configmap/mine" not in kubectl(api_server.kubeconfig, *listed).split()
    with pytest.raises(CommandError, match="not found"):
        kubectl(api_server.kubeconfig, "get", "configmap", "mine")


@pytest.mark.exhaustive
def test_the_api_server_keeps_its_objects_over_an_outage(
    api_server: ControlPlane, namespace: str
) -> None:
    """Address and objects are unchanged, and the other programs and the fake nodes keep running."""
    server = api_server.programs[API_SERVER]
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    api_server.api.create(maps, {"metadata": {"name": "kept"}})
    with api_server.fake_nodes(1):
        server.kill()
        with pytest.raises(OSError):
            api_server.api.get(f"{maps}/kept")
        server.start()
        api_server.wait_ready()
        assert api_server.api.get(f"{maps}/kept")["metadata"]["name"] == "kept"
        api_server.api.create(pods(namespace), POD)
        api_server.api.wait(
            pods(namespace, "one"), lambda it: it["status"]["phase"] == "Running", 30
        )


@pytest.mark.exhaustive
def test_teardown_leaves_nothing() -> None:
    """No process, file or network device is left that the next run would trip over."""
    with running.control_plane(controllers=None) as plane:
        room, running_programs = plane.instance, list(plane.programs.values())
        pids = [one.pid for one in running_programs if one.alive]
        assert len(pids) == 2
        assert plane.kubeconfig.is_file()
    assert not any(one.alive for one in running_programs)
    assert not room.folder.exists()
    assert leftovers.links(room.name) == []
    assert leftovers.processes(room.name) == set()


def test_a_killed_run_leaves_no_program_running() -> None:
    """After kill -9 the kernel ends the programs, and the next run removes the files."""
    script = (
        "from testing.cluster import running\n"
        "with running.control_plane(controllers=None) as plane:\n"
        "    pids = [one.pid for one in plane.programs.values() if one.alive]\n"
        "    print(plane.instance.index, *pids, flush=True)\n"
        "    input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        index, *pids = (int(word) for word in owner.stdout.readline().split())
        owner.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    room = instance.take(index)
    assert room is not None
    try:
        assert not list(room.folder.iterdir())
    finally:
        room.release(keep_logs=False)
