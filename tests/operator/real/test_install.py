"""Both Helm charts on a real API server: rights, removal, reinstallation, upgrade and schemas.

The fake nodes cannot run the operator's pod, so the operator is a process here, under the service
account that the chart makes.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from testing.cluster import programs
from testing.cluster.api import ApiError
from testing.cluster.commands import CommandError, helm, kubectl
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster import schemas
from testing.fake_cluster.beside import (
    ROOT,
    Running,
    change,
    holds,
    job,
    living,
    own_key,
    pods,
    submit,
    until,
)
from testing.fake_cluster.stub import Fleet
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

CHARTS = ROOT / "charts"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.paceline.dev"
EARLIER = ROOT / "tests/release/earlier"
FOREIGN = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate", "Issuer")
TAKE_OVER = ("--take-ownership", "--force-conflicts")
"""Options of helm for definitions that exist, of another version or not made by helm."""
LAST = "0.1.0"
"""The previous release; EARLIER has its charts as `make release` made them."""


class Release:
    """The operator's chart in a namespace, and the operator under its service account."""

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path) -> None:
        self.plane, self.namespace = plane, namespace
        self.running = Running(plane, namespace, folder / "operator.log")
        self.starts = 0

    def helm(self, *words: str) -> str:
        return helm(self.plane.kubeconfig, *words, "-n", self.namespace)

    def install(
        self, chart: Path = CHARTS / "paceline", *options: str, verb: str = "install"
    ) -> str:
        return self.helm(verb, "paceline", str(chart), *options)

    def start(self, *options: str) -> None:
        account = self.plane.kubeconfig_of_account(self.namespace, "paceline-operator")
        self.starts += 1
        self.running.started(*options, times=self.starts, kubeconfig=account)


@pytest.fixture
def release(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Release]:
    helm_release = Release(plane, namespace, tmp_path)
    try:
        yield helm_release
    finally:
        helm_release.running.end()
        for name in ("paceline", "paceline-crds"):
            if name in helm_release.helm("list", "-q").split():
                helm_release.helm("uninstall", name)
        # The tests after this one share the API server; a failure may leave an earlier definition.
        if plane.api.get(CRD)["spec"]["versions"] != definition()["spec"]["versions"]:
            helm_release.helm("install", "paceline-crds", str(CHARTS / "paceline-crds"), *TAKE_OVER)
            helm_release.helm("uninstall", "paceline-crds")


@contextmanager
def training(release: Release, replicas: int = 3) -> Iterator[Fleet]:
    """Run a training job on fake nodes."""
    plane, namespace = release.plane, release.namespace
    with plane.fake_nodes(2), Fleet(plane, namespace) as fleet:
        submit(plane, namespace, replicas=replicas)
        until(lambda: holds(job(plane, namespace), "RingReady"), "RingReady")
        until(lambda: len(living(plane, namespace)) == replicas, "all workers")
        yield fleet
        assert fleet.wrong == []


def uids(release: Release) -> dict[str, str]:
    all_pods = [*pods(release.plane, release.namespace)]
    all_pods += pods(release.plane, release.namespace, "coordinator")
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in all_pods}


def replaced(release: Release, ready: str = "3/3") -> None:
    """Check that the operator still manages the job: a deleted worker is recreated and joins."""
    plane, namespace = release.plane, release.namespace
    plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/digits-1-1")
    until(lambda: "digits-1-2" in living(plane, namespace), "a replacement")
    until(lambda: job(plane, namespace)["status"]["ready"] == ready, ready)


@pytest.mark.parametrize("gangs", exhaustive_except([True], [True, False]))
def test_rbac_gangs_grants_the_right_to_pod_groups(release: Release, gangs: bool) -> None:
    """Volcano is not installed here; the right to its groups decides the message."""
    plane, namespace = release.plane, release.namespace
    release.install(CHARTS / "paceline", f"--set=rbac.gangs={str(gangs).lower()}")
    release.start()
    scheduling = {"provider": "Volcano", "gang": {}}
    submit(plane, namespace, "whole", scheduling=scheduling)
    degraded = until(lambda: holds(job(plane, namespace, "whole"), "Degraded"), "Degraded", 20)
    assert degraded["reason"] == "SchedulerUnavailable"
    assert ("does not serve" if gangs else "rbac.gangs: true") in degraded["message"]
    submit(plane, namespace, elasticity={"disruptionBudget": True})
    until(lambda: job(plane, namespace).get("status", {}).get("disruptionBudget"), "a budget")
    change(plane, namespace, elasticity={"disruptionBudget": False})
    path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    until(lambda: not plane.api.items(path), "none again")


@pytest.mark.parametrize(
    "wide", exhaustive_except([True], [True, False]), ids=["cluster-wide", "namespaced"]
)
def test_the_rights_of_the_chart_are_sufficient(release: Release, wide: bool) -> None:
    """A job lives its whole life under the service account that the chart makes."""
    plane, namespace = release.plane, release.namespace
    notes = release.install(CHARTS / "paceline", f"--set=scope.clusterWide={str(wide).lower()}")
    assert ("loses: the sight of nodes" in notes) is not wide
    release.start(*(() if wide else (f"--namespace={namespace}", "--no-nodes")))
    with training(release) as fleet:
        replaced(release)
        fleet.finish()
        until(lambda: holds(job(plane, namespace), "Complete"), "Complete")
        until(lambda: not living(plane, namespace, "coordinator"), "the coordinator is gone")
    events = plane.api.items(f"/api/v1/namespaces/{namespace}/events")
    assert {"RingFormed", "JobFinished", "RankReplaced"} <= {event["reason"] for event in events}
    log = release.running.log.read_text()
    assert "cannot" not in log, log  # RBAC refusals contain this word


def test_the_chart_grants_no_unintended_rights(release: Release) -> None:
    plane, namespace = release.plane, release.namespace
    release.install()
    account = f"system:serviceaccount:{namespace}:paceline-operator"

    def may(user: str, verb: str, what: str, where: str = "default", part: str = "") -> bool:
        words = ["auth", "can-i", verb, what, "-n", where, f"--as={user}"]
        words += [f"--subresource={part}"] if part else []
        try:
            return kubectl(plane.kubeconfig, *words).strip() == "yes"
        except CommandError:
            return False

    assert may(account, "create", "secrets")
    for verb in ("get", "list", "watch", "update", "patch", "delete"):
        assert not may(account, verb, "secrets")
    assert may(account, "get", "secrets/paceline-operator-key", namespace)
    assert not may(account, "get", "secrets/other", namespace)
    for verb in ("create", "patch", "delete"):
        assert may(account, verb, "services/paceline-jobs")
        assert not may(account, verb, "services/other")
        assert not may(account, verb, "services")
    assert not may(account, "update", "trainingjobs")
    assert not may(account, "update", "pods")
    for user, role in (("reader", "view"), ("writer", "edit")):
        words = ["create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}"]
        kubectl(plane.kubeconfig, *words, "-n", namespace)
    until(lambda: may("reader", "get", "trainingjobs.paceline.dev", namespace), "view is extended")
    until(lambda: may("writer", "create", "trainingjobs.paceline.dev", namespace), "edit too")
    assert may("writer", "patch", "trainingjobs.paceline.dev", namespace, "scale")
    assert not may("reader", "create", "trainingjobs.paceline.dev", namespace)
    assert not may("writer", "patch", "trainingjobs.paceline.dev", namespace, "status")


@pytest.mark.exhaustive
def test_uninstalling_and_installing_again_keeps_everything(release: Release) -> None:
    plane, namespace = release.plane, release.namespace
    # The definition exists already, as after `kubectl apply`; helm has to take it over.
    release.helm("install", "paceline-crds", str(CHARTS / "paceline-crds"), "--take-ownership")
    release.install()
    release.start()
    with training(release) as fleet:
        before, key = uids(release), own_key(plane, namespace)
        body = job(plane, namespace)
        release.running.stop()
        release.helm("uninstall", "paceline")
        release.helm("uninstall", "paceline-crds")
        definition = plane.api.get(CRD)
        assert "deletionTimestamp" not in definition["metadata"]
        assert uids(release) == before
        assert job(plane, namespace)["metadata"]["uid"] == body["metadata"]["uid"]
        assert own_key(plane, namespace) == key
        with pytest.raises(ApiError, match="404"):
            plane.api.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/paceline-operator")

        release.helm("install", "paceline-crds", str(CHARTS / "paceline-crds"))
        release.install()
        release.start()
        assert plane.api.get(CRD)["metadata"]["uid"] == definition["metadata"]["uid"]
        replaced(release)
        assert own_key(plane, namespace) == key
        coordinator = fleet.coordinator()
        assert coordinator is not None
        assert coordinator.refused == 0, "the new operator has another key"
        kept = {name: uid for name, uid in uids(release).items() if name in before}
        assert kept == {name: uid for name, uid in before.items() if name != "digits-1-1"}


@pytest.mark.skipif(
    programs.KUBERNETES.startswith("v1.33."), reason="0.1.0 could not be installed before 1.34"
)
@contextmanager
def rights_of_today(release: Release) -> Iterator[None]:
    """Grant the reads of today's operator that the previous release's chart does not grant."""
    kubeconfig, namespace = release.plane.kubeconfig, release.namespace
    name = f"{namespace}-reads"
    read = "namespaces,services,poddisruptionbudgets.policy"
    account = f"--serviceaccount={namespace}:paceline-operator"
    kubectl(kubeconfig, "create", "clusterrole", name, "--verb=get", f"--resource={read}")
    kubectl(kubeconfig, "create", "clusterrolebinding", name, f"--clusterrole={name}", account)
    try:
        yield
    finally:
        kubectl(kubeconfig, "delete", "clusterrole,clusterrolebinding", name)


def test_an_upgrade_does_not_touch_a_running_job(release: Release) -> None:
    """The upgrade starts from the charts of the previous release.

    The operator of that release is not at hand, so none acts on its definitions: today's operator
    could not write a status that they do not know.
    """
    plane, namespace = release.plane, release.namespace
    crds, operator = (EARLIER / f"{name}-{LAST}.tgz" for name in ("paceline-crds", "paceline"))
    release.install(operator)
    release.start()
    with rights_of_today(release), training(release):
        until(lambda: job(plane, namespace)["status"]["ready"] == "3/3", "3/3")
        before = uids(release)
        generation = job(plane, namespace)["metadata"]["generation"]
        release.running.stop()
        release.helm("install", "paceline-crds", str(crds), *TAKE_OVER)
        assert plane.api.get(CRD)["spec"]["versions"] != definition()["spec"]["versions"]
        release.helm("upgrade", "paceline-crds", str(CHARTS / "paceline-crds"), "--take-ownership")
        assert plane.api.get(CRD)["spec"]["versions"] == definition()["spec"]["versions"]
        release.install(verb="upgrade")
        assert f"paceline-{version()}" in release.helm("list")
        release.start()
        replaced(release)  # also a pod of a job of the previous release (C14)
        kept = {name: uid for name, uid in uids(release).items() if name in before}
        assert kept == {name: uid for name, uid in before.items() if name != "digits-1-1"}
        after = job(plane, namespace)
        assert after["metadata"]["generation"] == generation
        assert after["status"]["restarts"]["failures"] == 0


@pytest.mark.exhaustive
def test_a_rollback_does_not_touch_a_running_job(release: Release) -> None:
    """Only the operator's chart is rolled back; definitions stay new (docs/upgrade.md)."""
    release.install(EARLIER / f"paceline-{LAST}.tgz")
    release.install(verb="upgrade")
    release.start()
    with training(release):
        before = uids(release)
        release.running.stop()
        release.helm("rollback", "paceline", "1")
        release.start()
        with rights_of_today(release):
            replaced(release)
        kept = {name: uid for name, uid in uids(release).items() if name in before}
        assert kept == {name: uid for name, uid in before.items() if name != "digits-1-1"}


def test_secure_metrics_are_served_to_authorized_accounts_only(release: Release) -> None:
    plane, namespace = release.plane, release.namespace
    release.install(CHARTS / "paceline", "--set=metrics.secure=true")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    release.start(f"--secure-metrics=127.0.0.1:{port}")
    reader = ("clusterrolebinding", f"{namespace}-scraper")
    for account in ("prometheus", "other"):
        kubectl(plane.kubeconfig, "create", "serviceaccount", account, "-n", namespace)
    (role,) = (
        item["metadata"]["name"]
        for item in plane.api.items("/apis/rbac.authorization.k8s.io/v1/clusterroles")
        if item["metadata"]["name"].endswith("-metrics-reader")
    )
    subject = f"--serviceaccount={namespace}:prometheus"
    kubectl(plane.kubeconfig, "create", *reader, f"--clusterrole={role}", subject)
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE

    def status(account: str) -> int:
        config = yaml.safe_load(plane.kubeconfig_of_account(namespace, account).read_text())
        token = config["users"][0]["user"]["token"]
        asked = Request(
            f"https://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urlopen(asked, context=anybody, timeout=10) as answer:
                return int(answer.status)
        except HTTPError as error:
            return error.code

    try:
        until(lambda: status("prometheus") == 200, "the one who may read")
        assert status("other") == 403
    finally:
        kubectl(plane.kubeconfig, "delete", *reader)


# ---- the next version of the API, rehearsed ------------------------------------------------------


@pytest.mark.exhaustive
def test_v1beta1_with_the_same_schema_needs_no_webhook(release: Release) -> None:
    """Version v1beta1 is served, then stored, then the only stored one, and all is reverted.

    Meanwhile a job trains and the operator reads v1alpha1.
    """
    plane, namespace = release.plane, release.namespace
    release.install()
    release.start()
    with training(release):
        before = uids(release)
        body = job(plane, namespace)
        try:
            versions(plane, "v1alpha1", "v1beta1")
            newer = until(lambda: job_as(plane, namespace, "v1beta1"), "v1beta1 is served")
            assert newer["spec"] == body["spec"]
            assert newer["status"].keys() == body["status"].keys()
            refused = {"spec": {"replicas": -1}}
            with pytest.raises(ApiError, match=r"spec\.replicas"):
                plane.api.patch(path_as(namespace, "v1beta1"), refused)
            plane.api.patch(path_as(namespace, "v1beta1"), {"spec": {"replicas": 4}})
            until(lambda: job(plane, namespace)["status"]["ready"] == "4/4", "4/4")

            versions(plane, "v1alpha1", "v1beta1", stored="v1beta1")
            store_anew(plane, "v1beta1")
            assert plane.api.get(CRD)["status"]["storedVersions"] == ["v1beta1"]
            replaced(release, "4/4")
        finally:
            versions(plane, "v1alpha1", "v1beta1")
            store_anew(plane, "v1alpha1")
            versions(plane, "v1alpha1")
            until(lambda: job_as(plane, namespace, "v1beta1") is None, "v1beta1 is gone")
            until(
                lambda: "paceline.dev/v1beta1" not in api_versions(plane),
                "nobody is told of v1beta1",
            )
        assert job(plane, namespace)["metadata"]["uid"] == body["metadata"]["uid"]
        kept = {name: uid for name, uid in uids(release).items() if name in before}
        assert kept == {name: uid for name, uid in before.items() if name != "digits-1-1"}


def api_versions(plane: ControlPlane) -> str:
    """Return the server's API versions; this also removes old ones from kubectl's cache."""
    return kubectl(plane.kubeconfig, "api-versions")


def version() -> str:
    return str(yaml.safe_load((CHARTS / "paceline/Chart.yaml").read_text())["version"])


def definition() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(
        (CHARTS / "paceline-crds/files/trainingjobs.yaml").read_text()
    )
    return read


def versions(plane: ControlPlane, *names: str, stored: str = "v1alpha1") -> None:
    """Set the versions of the definition, all with the same schema."""
    (only,) = definition()["spec"]["versions"]
    entries = [only | {"name": name, "storage": name == stored} for name in names]
    plane.api.patch(CRD, {"spec": {"versions": entries, "conversion": {"strategy": "None"}}})


def store_anew(plane: ControlPlane, version: str) -> None:
    """Write every job once more unchanged, so that no other version is stored."""
    resource = f"trainingjobs.{version}.paceline.dev"

    def written() -> bool:
        jobs = kubectl(plane.kubeconfig, "get", resource, "-A", "-o", "json")
        try:
            kubectl(plane.kubeconfig, "replace", "-f", "-", stdin=jobs)
        except CommandError as error:
            # The operator has written the job in between. Or the server, which rebuilds its storage
            # when the definition changes, does not find what it has just listed.
            if not any(words in str(error) for words in ("has been modified", "(NotFound)")):
                raise
            return False
        return True

    until(written, f"all jobs are stored as {version}")
    plane.api.patch(f"{CRD}/status", {"status": {"storedVersions": [version]}})


def path_as(namespace: str, version: str) -> str:
    return f"/apis/paceline.dev/{version}/namespaces/{namespace}/trainingjobs/digits"


def job_as(plane: ControlPlane, namespace: str, version: str) -> dict[str, Any] | None:
    try:
        return plane.api.get(path_as(namespace, version))
    except ApiError as error:
        if error.status != 404:
            raise
        return None


# ---- validation by the cluster -------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema_location(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> str:
    return schemas.write(plane.api, tmp_path_factory.mktemp("schemas"))


def conform(location: str, text: str, *options: str) -> str:
    words = ["-strict", "-summary", "-verbose", "-schema-location", location, *options, "-"]
    done = subprocess.run(
        [programs.require("kubeconform"), *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "file", ["chart-default", "chart-namespaced", "chart-everything", "plain", "rich"]
)
def test_manifests_conform_to_the_schemas_of_the_cluster(schema_location: str, file: str) -> None:
    """Kinds of other projects are left to test_foreign_kinds."""
    text = (ROOT / f"tests/operator/golden/{file}.yaml").read_text()
    output = conform(schema_location, text, "-skip", ",".join(FOREIGN))
    assert "Invalid: 0, Errors: 0" in output
    assert "Valid: 0" not in output


def test_the_conformance_check_detects_a_wrong_field(schema_location: str) -> None:
    text = (ROOT / "tests/operator/golden/plain.yaml").read_text()
    with pytest.raises(AssertionError, match="restartPolice"):
        conform(schema_location, text.replace("restartPolicy", "restartPolice"))


def test_pods_are_admitted_in_a_restricted_namespace(plane: ControlPlane) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    with plane.namespace("restricted") as namespace:
        path = f"/api/v1/namespaces/{namespace}"
        plane.api.patch(path, {"metadata": {"labels": label}})
        for pod in security_candidates():
            pod["metadata"] = {"name": "x", "labels": pod["metadata"].get("labels", {})}
            pod["spec"].pop("serviceAccountName", None)
            pod["spec"].pop("priorityClassName", None)
            plane.api.create(f"{path}/pods?dryRun=All&fieldValidation=Strict", pod)
        pod["spec"]["hostNetwork"] = True
        with pytest.raises(ApiError, match="hostNetwork"):  # the namespace does enforce its level
            plane.api.create(f"{path}/pods?dryRun=All", pod)


def security_candidates() -> Iterator[dict[str, Any]]:
    for file in ("plain", "rich"):
        text = (ROOT / f"tests/operator/golden/{file}.yaml").read_text()
        yield from (body for body in yaml.load_all(text, yaml.CSafeLoader) if body["kind"] == "Pod")
    text = (ROOT / "tests/operator/golden/chart-everything.yaml").read_text()
    for body in yaml.load_all(text, yaml.CSafeLoader):
        if body and body["kind"] == "Deployment":
            yield {"apiVersion": "v1", "kind": "Pod", **body["spec"]["template"]}
