"""The operator as a process against a real API server, with nodes that only look like some."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.audit import requests_of
from cluster.commands import helm
from cluster.control_plane import ControlPlane
from fake_cluster.stub import Stub
from fake_cluster.world import job_body

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
JOBS = "/apis/paceline.dev/v1alpha1/namespaces/{}/trainingjobs"
USER = "paceline-operator"
ONCE = 1
"""The operator's own key is made once in its life."""


@pytest.fixture(scope="module")
def plane(api_server: ControlPlane) -> ControlPlane:
    crd = yaml.safe_load((ROOT / "crds/manifests/trainingjobs.yaml").read_text())
    name = crd["metadata"]["name"]
    api = api_server.api
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", crd)

    def known() -> bool:
        groups = api.get("/apis")["groups"]
        return any(group["name"] == "paceline.dev" for group in groups)

    until(known, "the CRD is served")
    return api_server


def until(check: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := check():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Running:
    def __init__(self, plane: ControlPlane, namespace: str, log: Path) -> None:
        self.plane, self.namespace, self.log = plane, namespace, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        *options: str,
        identity: str = "one",
        port: int = 18080,
        kubeconfig: Path | None = None,
    ) -> None:
        kubeconfig = kubeconfig or self.plane.kubeconfig_of(USER, "system:masters")
        command = [sys.executable, "-m", "paceline_operator", f"--kubeconfig={kubeconfig}"]
        command += [f"--own-namespace={self.namespace}", f"--identity={identity}"]
        command += [f"--listen=127.0.0.1:{port}", "--log-format=text", *options]
        paths = os.pathsep.join(str(ROOT / part) for part in ("crds", "operator"))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stderr=log, env=os.environ | {"PYTHONPATH": paths}
            )

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)


@contextmanager
def operator_of(plane: ControlPlane, namespace: str, log: Path) -> Iterator[Running]:
    running = Running(plane, namespace, log)
    try:
        running.start()
        yield running
    finally:
        if running.process is not None and running.process.poll() is None:
            running.stop(signal.SIGKILL)


@pytest.fixture
def running(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Running]:
    with operator_of(plane, namespace, tmp_path / "operator.log") as running:
        yield running
        if os.environ.get("SHOW_OPERATOR_LOG"):
            sys.stderr.write((tmp_path / "operator.log").read_text())


def submit(plane: ControlPlane, namespace: str, **spec: Any) -> dict[str, Any]:
    return plane.api.create(JOBS.format(namespace), job_body(**spec))


def job(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    return plane.api.get(JOBS.format(namespace) + "/digits")


def pods(plane: ControlPlane, namespace: str, role: str = "worker") -> list[dict[str, Any]]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    return plane.api.items(path, labels=f"paceline.dev/role={role}")


def living(plane: ControlPlane, namespace: str) -> list[str]:
    return sorted(
        pod["metadata"]["name"]
        for pod in pods(plane, namespace)
        if "deletionTimestamp" not in pod["metadata"]
        and pod["status"]["phase"] not in ("Succeeded", "Failed")
    )


def holds(body: dict[str, Any], kind: str) -> dict[str, Any] | None:
    for condition in body.get("status", {}).get("conditions", []):
        if condition["type"] == kind and condition["status"] == "True":
            return condition
    return None


def own_key(plane: ControlPlane, namespace: str) -> bytes:
    secret = plane.api.get(f"/api/v1/namespaces/{namespace}/secrets/paceline-operator-key")
    return base64.b64decode(secret["data"]["key"])


def acts(plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    """An operator has made its key and holds the Lease."""
    return plane.api.items(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases")


def coordinator_uid(plane: ControlPlane, namespace: str) -> str:
    posts = until(lambda: pods(plane, namespace, "coordinator"), "a coordinator")
    return posts[-1]["metadata"]["uid"]


def test_a_job_from_creation_to_its_end(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    with plane.fake_nodes(3):
        log = plane.audit_log
        assert log is not None
        body = submit(plane, namespace, replicas=4)
        until(lambda: len(living(plane, namespace)) == 4, "4 workers")
        key = own_key(plane, namespace)
        post = coordinator_uid(plane, namespace)
        with Stub(key, body["metadata"]["uid"], post, 4) as stub:
            until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
            assert stub.refused == 0
            spent = _own_requests(log)
            assert spent.total() - ONCE <= 4 + 7, spent

            scaled = time.monotonic()
            path = JOBS.format(namespace) + "/digits"
            plane.api.patch(f"{path}/scale", {"spec": {"replicas": 6}})
            until(lambda: len(living(plane, namespace)) == 6, "6 workers")
            assert time.monotonic() - scaled < 5
            until(lambda: job(plane, namespace)["status"]["ready"] == "6/6", "6/6")
            assert stub.targets[-1]["replicas"] == 6

            for attempt in (2, 3, 4):
                name = f"digits-1-{attempt - 1}"
                plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")
                until(lambda n=attempt: f"digits-1-{n}" in living(plane, namespace), "anew", 5)
            until(
                lambda: job(plane, namespace)["status"]["restarts"]["replicas"] == 3,
                "3 replacements are counted",
            )
            until(lambda: job(plane, namespace)["status"]["ready"] == "6/6", "6/6 again")

            stub.finish()
            until(lambda: holds(job(plane, namespace), "Complete"), "Complete")
        assert running.process is not None
        assert running.process.poll() is None


def _own_requests(log: Path) -> Counter[tuple[str, str]]:
    """But for the Lease and the start: watches, lists, discovery."""
    return Counter(
        {
            (verb, what): count
            for (verb, what), count in requests_of(log, user=USER).items()
            if verb in ("create", "patch", "update", "delete") and "leases" not in what
        }
    )


def test_a_bad_template_is_told_in_the_words_of_the_api_server(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    trainer = {"name": "trainer", "image": "t", "command": ["x"], "resourcess": {}}
    started = time.monotonic()
    until(lambda: acts(plane, namespace), "an operator")
    template = {"spec": {"containers": [trainer]}}
    submit(plane, namespace, replicas=3, template=template)

    def told() -> dict[str, Any] | None:
        return holds(job(plane, namespace), "Degraded")

    condition = until(told, "Degraded", 20)
    assert condition["reason"] == "TemplateInvalid"
    assert "resourcess" in condition["message"]
    assert pods(plane, namespace) == []
    assert pods(plane, namespace, "coordinator") == []
    assert time.monotonic() - started < 20


def test_a_quota_is_told_and_retried(plane: ControlPlane, namespace: str, running: Running) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    plane.api.create(path, quota)
    until(lambda: plane.api.get(f"{path}/few").get("status", {}).get("hard"), "the quota counts")
    with plane.fake_nodes(2):
        submit(plane, namespace, replicas=4)
        condition = until(lambda: holds(job(plane, namespace), "Degraded"), "Degraded", 30)
        assert condition["reason"] == "QuotaExceeded"
        assert "exceeded quota" in condition["message"]
        plane.api.patch(f"{path}/few", {"spec": {"hard": {"pods": "10"}}})
        until(lambda: len(living(plane, namespace)) == 4, "4 workers")
        until(lambda: not holds(job(plane, namespace), "Degraded"), "no longer degraded")


def test_an_operator_that_is_killed_goes_on_where_it_was(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    until(lambda: acts(plane, namespace), "an operator")
    running.stop(signal.SIGKILL)
    running.start("--lease-duration=300")
    until(lambda: running.log.read_text().count("leading as") == 2, "it leads again")
    running.stop(signal.SIGKILL)
    submit(plane, namespace, replicas=5)
    running.start("--lease-duration=300")  # the same identity waits for no Lease
    until(lambda: len(living(plane, namespace)) == 5, "5 workers", 60)
    assert living(plane, namespace) == [f"digits-{n}-1" for n in range(5)]
    assert running.stop() == 0


def test_of_two_operators_one_acts_and_the_other_takes_over(
    plane: ControlPlane, namespace: str, running: Running, tmp_path: Path
) -> None:
    until(lambda: acts(plane, namespace), "an operator")
    other = Running(plane, namespace, tmp_path / "other.log")
    other.start("--lease-duration=3", identity="two", port=18081)
    running.stop(signal.SIGKILL)
    running.start("--lease-duration=3", port=18080)
    try:
        submit(plane, namespace, replicas=2)
        until(lambda: len(living(plane, namespace)) == 2, "2 workers", 30)
        assert running.process is not None
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/paceline-operator"
        holder = plane.api.get(lease)["spec"]["holderIdentity"]
        leader = running if holder == "one" else other
        leader.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
        plane.api.patch(JOBS.format(namespace) + "/digits", {"spec": {"replicas": 4}})
        stopped = time.monotonic()
        until(lambda: len(living(plane, namespace)) == 4, "4 workers", 30)
        took = time.monotonic() - stopped
        leader.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        assert leader.process.wait(20) == 3, "a deposed leader ends"  # type: ignore[union-attr]
        assert len(living(plane, namespace)) == 4
        assert took < 10, took
    finally:
        if other.process is not None and other.process.poll() is None:
            other.stop(signal.SIGKILL)


@pytest.mark.parametrize("wide", [True, False], ids=["cluster-wide", "namespaced"])
def test_the_rights_of_the_chart_are_enough(
    plane: ControlPlane, namespace: str, tmp_path: Path, wide: bool
) -> None:
    """A job's life under the service account that the chart makes, and no more than that."""
    chart = str(ROOT / "charts/paceline")
    scope = f"--set=scope.clusterWide={str(wide).lower()}"
    helm(plane.kubeconfig, "install", "paceline", chart, "-n", namespace, scope, "--set=replicas=1")
    account = plane.kubeconfig_of_account(namespace, "paceline-operator")
    running = Running(plane, namespace, tmp_path / "operator.log")
    options = () if wide else (f"--namespace={namespace}", "--no-nodes")
    try:
        running.start(*options, kubeconfig=account)
        with plane.fake_nodes(2):
            body = submit(plane, namespace, replicas=2, cleanPodPolicy="All")
            until(lambda: len(living(plane, namespace)) == 2, "2 workers", 30)
            key, post = own_key(plane, namespace), coordinator_uid(plane, namespace)
            with Stub(key, body["metadata"]["uid"], post, 2) as stub:
                until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
                stub.finish()
                until(lambda: holds(job(plane, namespace), "Complete"), "Complete")
            for pod in pods(plane, namespace):
                plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}")
            until(lambda: not pods(plane, namespace, "coordinator"), "the coordinator is gone")
        events = plane.api.items(f"/api/v1/namespaces/{namespace}/events")
        assert {"RingFormed", "JobFinished"} <= {event["reason"] for event in events}
        log = running.log.read_text()
        assert "cannot" not in log, log  # as RBAC words a refusal
    finally:
        if running.process is not None and running.process.poll() is None:
            running.stop()
        helm(plane.kubeconfig, "uninstall", "paceline", "-n", namespace)
    assert own_key(plane, namespace) == key, "the key outlives the release"
    assert job(plane, namespace)["metadata"]["uid"] == body["metadata"]["uid"]
