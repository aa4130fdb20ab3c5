"""A control plane for benchmarks of the operator, and the reading of its audit log.

Nodes are fake (testing/cluster/fake_kubelet.py), coordinators are stubs
(testing/fake_cluster/stub.py), everything else is real. Times come from the audit log, so measuring
costs no request.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from testing.cluster import running as running
from testing.cluster.audit import read_on
from testing.cluster.control_plane import RAISED, ControlPlane
from testing.fake_cluster.beside import (
    JOBS,
    KINDS,
    OPERATOR,
    WRITES,
    Running,
    holds,
    install_crd,
    submit,
    until,
    until_quiet,
)
from testing.fake_cluster.stub import Fleet

__all__ = [
    "JOBS",
    "RAISED",
    "Asked",
    "Bench",
    "Fleet",
    "bench",
    "first",
    "gone",
    "holds",
    "indexed_job",
    "pods_made",
    "submit",
    "until",
    "until_quiet",
]

NODES: Final = 4
SAMPLE_S: Final = 0.2
PODS_PER_NODE: Final = 2500
POST: Final = "create"


@dataclass(frozen=True)
class Asked:
    """One request, as the API server has logged it."""

    at_s: float
    """Time at which it was answered."""
    user: str
    verb: str
    kind: str
    """Plural of the resource, with the subresource if there is one."""
    namespace: str
    name: str
    code: int


@dataclass
class Bench:
    """Control plane and operator of a measurement, with its requests and CPU samples so far."""

    plane: ControlPlane
    operator: Running
    own: str
    """Namespace of the operator."""
    offset: int = 0
    """Position up to which the audit log has been read."""
    requests: list[Asked] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """CPU-seconds so far by program, with the time of the sample."""
    ended: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Begin a measurement; earlier requests and samples are dropped."""
        self.asked()
        self.requests.clear()
        self.samples[:] = [(time.time(), self.cpu())]

    def sample(self) -> None:
        """Take a CPU sample every SAMPLE_S until the bench has ended.

        This runs in a thread of its own, so that CPU-seconds end when the work does, and not the
        waiting.
        """
        while not self.ended.wait(SAMPLE_S):
            self.samples.append((time.time(), self.cpu()))

    def asked(self, *, since: int = 0) -> list[Asked]:
        """Read what is new in the audit log and return the requests since `begin`.

        `since` skips that many of the first requests.

        Returns:
            Requests in the order of the log.
        """
        assert self.plane.audit_log is not None
        for offset, entry in read_on(self.plane.audit_log, self.offset):
            self.offset = offset
            if entry["stage"] == "ResponseComplete":
                self.requests.append(_asked(entry))
        return self.requests[since:]

    def own_requests(self, namespace: str, *, but: str = "") -> Counter[tuple[str, str]]:
        """Count the operator's requests in a namespace.

        The Lease, lists, watches, and requests for the job `but` do not count.

        Returns:
            Counts by verb and kind.
        """
        return Counter(
            (a.verb, a.kind)
            for a in self.asked()
            if not _belongs(a.name, but)
            and a.user == self.operator.user
            and a.namespace == namespace
            and a.kind in KINDS
            and a.verb in (*WRITES, "get")
        )

    def cpu(self) -> dict[str, float]:
        """Return the CPU-seconds so far of each program."""
        return {**self.plane.cpu_seconds(), "operator": self.operator.cpu_seconds()}

    def spent_s(self, until_s: float) -> dict[str, float]:
        """Return the CPU-seconds by program from `begin` to a past moment."""
        _, before = self.samples[0]
        after = next((cpu for at_s, cpu in self.samples if at_s >= until_s), self.cpu())
        return {name: spent - before.get(name, 0.0) for name, spent in after.items()}


@contextmanager
def bench(log: Path) -> Iterator[Bench]:
    """Start a fresh control plane with fake nodes, and the operator beside it.

    Args:
        log: File for the operator's log.

    Yields:
        The bench; everything is ended after the context.
    """
    with running.control_plane(audit=True) as plane:
        install_crd(plane)
        with (
            plane.namespace("operator") as own,
            plane.fake_nodes(NODES, pods_per_node=PODS_PER_NODE),
        ):
            operator = Running(plane, own, log)
            try:
                operator.started(program=OPERATOR)
                made = Bench(plane, operator, own)
                meter = threading.Thread(target=made.sample, daemon=True)
                meter.start()
                try:
                    yield made
                finally:
                    made.ended.set()
                    meter.join()
            finally:
                operator.end()


def _asked(entry: dict[str, Any]) -> Asked:
    what = entry.get("objectRef") or {}
    return Asked(
        datetime.fromisoformat(entry["stageTimestamp"]).timestamp(),
        entry["user"]["username"],
        entry["verb"],
        "/".join(filter(None, (what.get("resource"), what.get("subresource")))),
        what.get("namespace", ""),
        what.get("name", ""),
        entry["responseStatus"]["code"],
    )


def _belongs(name: str, job: str) -> bool:
    return bool(job) and (name == job or name.startswith((f"{job}-", f"{job}.")))


def pods_made(requests: list[Asked], namespace: str) -> list[float]:
    """Return the times at which pods were created."""
    return [
        a.at_s
        for a in requests
        if (a.verb, a.kind, a.namespace) == (POST, "pods", namespace) and a.code == 201
    ]


def first(requests: list[Asked], namespace: str, kind: str) -> float:
    """Return when the first object of this kind was created."""
    return min(a.at_s for a in requests if (a.kind, a.verb, a.namespace) == (kind, POST, namespace))


def gone(bench: Bench, namespace: str, seconds: float, *, labels: str = "") -> None:
    """Wait until no pod of the namespace with these labels is left."""
    path = f"/api/v1/namespaces/{namespace}/pods?limit=1&labelSelector={quote(labels)}"

    def none() -> bool:
        time.sleep(1.0)  # a request costs CPU time that is measured
        return not bench.plane.api.get(path)["items"]

    until(none, "all pods are gone", seconds)


def indexed_job(name: str, workers: int) -> dict[str, Any]:
    """Return a plain Indexed Job with the same worker pods."""
    trainer = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": workers,
            "parallelism": workers,
            "completionMode": "Indexed",
            "template": {"spec": {"restartPolicy": "Never", "containers": [trainer]}},
        },
    }
