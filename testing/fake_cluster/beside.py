"""The operator as a process beside a real API server, and the queries that tests make to both.

Nodes are fake (testing.cluster.fake_kubelet), coordinators are stubs (testing.fake_cluster.stub).
"""

from __future__ import annotations

import base64
import os
import signal
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml
from paceline_operator.cluster.tls import certificates_of
from paceline_operator.core.keys import JobKeys

from testing.cluster.api import Api, ApiError
from testing.cluster.audit import entries
from testing.cluster.control_plane import ControlPlane
from testing.cluster.instance import Instance
from testing.fake_cluster.forked_operator import ForkedOperator
from testing.fake_cluster.parts import job_body
from testing.temporary import temporary_folder

ROOT = Path(__file__).parent.parent.parent
CRD = ROOT / "crds/manifests/trainingjobs.yaml"
DEFINITIONS = sorted(CRD.parent.glob("*.yaml"))
JOBS = "/apis/paceline.dev/v1alpha1/namespaces/{}/trainingjobs"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
USER = "paceline-operator"
OPERATOR = (sys.executable, "-m", "paceline_operator")
"""Command that executes the operator, for measurements of its memory and start."""
POLL_LEAST_S, POLL_PART, POLL_MOST_S = 0.02, 0.1, 0.2
"""Interval between two polls: a part of the time waited so far, within limits in seconds."""
WRITES = ("create", "patch", "update", "delete", "deletecollection")


class Plane(Protocol):
    """An API server, real or in memory (testing.fake_cluster.loopback)."""

    @property
    def api(self) -> Api:
        """Client of the API server as an administrator."""

    @property
    def instance(self) -> Instance:
        """The reservation that names the ports and addresses in use."""

    def kubeconfig_of(self, user: str, *groups: str) -> Path:
        """Write a kubeconfig for a user with these groups and return its path."""


def until(check: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Poll until `check` returns something true, and return that; `what` names it in the error."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < seconds:
        if result := check():
            return result
        # Most checks ask the API server, which needs the cores more than a quick answer.
        time.sleep(min(max(POLL_LEAST_S, waited * POLL_PART), POLL_MOST_S))
    raise AssertionError(f"not within {seconds:g} s: {what}")


def until_quiet(
    requests: Callable[[], int], span_s: float, seconds: float, *, at_most: int = 1
) -> None:
    """Wait until at most `at_most` requests are made in `span_s` seconds.

    Args:
        requests: returns the number of requests so far.
        span_s: length of the interval.
        seconds: upper bound on the wait.
        at_most: requests that are allowed; one may be a status figure that is still being written.
    """

    def quiet() -> bool:
        before = requests()
        time.sleep(span_s)
        return requests() - before <= at_most

    until(quiet, "the operator rests", seconds)


def install_crd(plane: ControlPlane) -> None:
    """Install the CRDs and wait until the API server accepts jobs."""
    for file in DEFINITIONS:
        crd = yaml.load(file.read_text(), yaml.CSafeLoader)
        name = crd["metadata"]["name"]
        plane.api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", crd)

    def served() -> bool:
        try:
            plane.api.create(JOBS.format("default") + "?dryRun=All", job_body())
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    until(served, "TrainingJobs are served")


class Running:
    """One operator process acting as `user`, for the audit log; it can be started again."""

    def __init__(self, plane: Plane, namespace: str, log: Path, *, user: str = USER) -> None:
        self.plane, self.namespace, self.log, self.user = plane, namespace, log, user
        self.process: subprocess.Popen[bytes] | ForkedOperator | None = None
        self.port = 0
        """Port of its health and metrics while it runs."""

    def start(
        self,
        *options: str,
        identity: str = "one",
        kubeconfig: Path | None = None,
        program: tuple[str, ...] | None = None,
    ) -> None:
        """Start the process without waiting until it acts.

        Args:
            options: more options of the operator.
            identity: its name in the Lease.
            kubeconfig: file to use instead of an administrator's.
            program: command to execute. By default the operator is forked, which saves its imports
                but shares memory with other processes.
        """
        self._release()
        self.port = self.plane.instance.free_port()
        kubeconfig = kubeconfig or self.plane.kubeconfig_of(self.user, "system:masters")
        command = [*(program or ()), f"--kubeconfig={kubeconfig}"]
        command += [f"--own-namespace={self.namespace}", f"--identity={identity}"]
        command += [f"--listen=127.0.0.1:{self.port}", "--log-format=text", *options]
        paths = os.pathsep.join(str(ROOT / part) for part in ("crds", "operator", "tests"))
        env = os.environ | {"PYTHONPATH": paths}
        with self.log.open("ab") as log:
            if program:
                self.process = subprocess.Popen(command, stderr=log, env=env)
            else:
                files = (1, log.fileno())
                self.process = ForkedOperator(command, ROOT, env, "operator", files)

    def started(self, *options: str, times: int = 1, **more: Any) -> None:
        """Start it and wait until its log has reported `times` times that it acts."""
        self.start(*options, **more)
        until(lambda: self.log.read_text().count("acting for") >= times, "the operator acts")

    def send(self, number: int) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end and return the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)

    def end(self) -> None:
        """Kill the process if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.stop(signal.SIGKILL)
        self._release()

    def _release(self) -> None:
        """Close the descriptors of a forked process that has ended."""
        if isinstance(self.process, ForkedOperator):
            self.process.close()

    def memory_mib(self, figure: str = "VmRSS") -> float:
        """Return a memory figure of /proc: VmRSS is the present size, VmHWM the peak."""
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith(figure))
        return int(line.split()[1]) / 1024

    def cpu_seconds(self) -> float:
        """Return the user and system time used so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def operator_of(plane: ControlPlane, namespace: str, log: Path) -> Iterator[Running]:
    """Run an operator for a namespace; SHOW_OPERATOR_LOG prints its log at the end."""
    running = Running(plane, namespace, log)
    try:
        running.start()
        yield running
    finally:
        running.end()
        if os.environ.get("SHOW_OPERATOR_LOG"):
            sys.stderr.write(log.read_text())


def submit(plane: Plane, namespace: str, name: str = "digits", **spec: Any) -> dict[str, Any]:
    """Create a job and return it as the server stored it."""
    return plane.api.create(JOBS.format(namespace), job_body(name, **spec))


def change(plane: ControlPlane, namespace: str, name: str = "digits", **spec: Any) -> None:
    """Patch the spec of a job."""
    plane.api.patch(f"{JOBS.format(namespace)}/{name}", {"spec": spec})


def job(plane: ControlPlane, namespace: str, name: str = "digits") -> dict[str, Any]:
    """Return a job as the API server has it."""
    return plane.api.get(f"{JOBS.format(namespace)}/{name}")


def pods(plane: ControlPlane, namespace: str, role: str = "worker") -> list[dict[str, Any]]:
    """Return all pods of a role, ended ones included."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    return plane.api.items(path, labels=f"paceline.dev/role={role}")


def stays(pod: dict[str, Any]) -> bool:
    """Return True if a pod has neither ended nor been deleted."""
    ended = pod["status"]["phase"] in ("Succeeded", "Failed")
    return not ended and "deletionTimestamp" not in pod["metadata"]


def living(plane: ControlPlane, namespace: str, role: str = "worker") -> list[str]:
    """Return the names of the pods of a role that have not ended and are not being deleted."""
    return sorted(pod["metadata"]["name"] for pod in pods(plane, namespace, role) if stays(pod))


def holds(body: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the condition of this type if it is True, else None."""
    for condition in body.get("status", {}).get("conditions", []):
        if condition["type"] == kind and condition["status"] == "True":
            result: dict[str, Any] = condition
            return result
    return None


def own_key(plane: Plane, namespace: str) -> bytes:
    """Return the operator's key from its Secret."""
    secret = plane.api.get(f"/api/v1/namespaces/{namespace}/secrets/paceline-operator-key")
    return base64.b64decode(secret["data"]["key"])


def holder(plane: ControlPlane, namespace: str) -> str:
    """Return the identity that holds the operator's Lease, or "" if none does."""
    try:
        lease = plane.api.get(LEASES.format(namespace) + "/paceline-operator")
    except ApiError as error:
        if error.status == 404:
            return ""
        raise
    return str(lease["spec"].get("holderIdentity") or "")


def own_requests(
    plane: ControlPlane,
    namespace: str,
    *,
    user: str = USER,
    offset: int = 0,
    dry_runs: bool = True,
) -> Counter[tuple[str, str]]:
    """Count a user's requests in one namespace, except Leases, watches and lists."""
    assert plane.audit_log is not None
    counts: Counter[tuple[str, str]] = Counter()
    for entry in entries(plane.audit_log, offset=offset):
        what = entry.get("objectRef") or {}
        kind = "/".join(filter(None, (what.get("resource"), what.get("subresource"))))
        mine = entry["user"].get("username") == user and what.get("namespace") == namespace
        if not dry_runs and "dryRun=" in entry["requestURI"]:
            continue
        if mine and kind in KINDS and entry["verb"] in (*WRITES, "get"):
            counts[entry["verb"], kind] += 1
    return counts


KINDS = (
    *("pods", "secrets", "services", "events"),
    *("trainingjobs", "trainingjobs/status", "podgroups", "poddisruptionbudgets"),
)


def server_context(keys: JobKeys) -> ssl.SSLContext:
    """Return a coordinator's TLS context: callers need a certificate of the job's authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificates = certificates_of(keys)
    pair = certificates.server
    with temporary_folder() as folder:
        certificate, key = folder / "crt", folder / "key"
        certificate.write_text(pair.certificate)
        key.write_text(pair.private_key)
        context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificates.callers)
    return context
