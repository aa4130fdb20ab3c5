"""A control plane for benchmarks of the operator, and what its audit log tells of a run.

Nodes are fake (tests/cluster/fake_kubelet.py), coordinators are stubs (tests/fake_cluster/stub.py),
everything else is real. Moments come from the audit log, so measuring costs no request.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from cluster import running  # noqa: E402
from cluster.audit import entries  # noqa: E402
from cluster.control_plane import RAISED, ControlPlane  # noqa: E402
from fake_cluster.beside import (  # noqa: E402
    JOBS,
    KINDS,
    WRITES,
    Running,
    holds,
    install_crd,
    submit,
    until,
)
from fake_cluster.stub import Fleet  # noqa: E402

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
]

NODES: Final = 4
PODS_PER_NODE: Final = 2500
POST: Final = "create"
WATCHES: Final = ("watch", "list")


@dataclass(frozen=True)
class Asked:
    """One request, as the API server has logged it."""

    at_s: float
    """When it was answered."""
    user: str
    verb: str
    kind: str
    """Plural, with the subresource if there is one."""
    namespace: str
    name: str
    code: int


@dataclass
class Bench:
    plane: ControlPlane
    operator: Running
    own: str
    """Namespace of the operator."""
    offset: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """What comes before is not looked at."""
        assert self.plane.audit_log is not None
        self.offset = self.plane.audit_log.stat().st_size
        self.cpu_s = self.cpu()

    def asked(self) -> Iterator[Asked]:
        assert self.plane.audit_log is not None
        for entry in entries(self.plane.audit_log, offset=self.offset):
            what = entry.get("objectRef") or {}
            if entry["stage"] != "ResponseComplete":
                continue
            yield Asked(
                datetime.fromisoformat(entry["stageTimestamp"]).timestamp(),
                entry["user"]["username"],
                entry["verb"],
                "/".join(filter(None, (what.get("resource"), what.get("subresource")))),
                what.get("namespace", ""),
                what.get("name", ""),
                entry["responseStatus"]["code"],
            )

    def own_requests(self, namespace: str) -> Counter[tuple[str, str]]:
        """The operator's, but for the Lease, lists and watches."""
        return Counter(
            (a.verb, a.kind)
            for a in self.asked()
            if a.user == self.operator.user
            and a.namespace == namespace
            and a.kind in KINDS
            and a.verb in (*WRITES, "get")
        )

    def cpu(self) -> dict[str, float]:
        return {**self.plane.cpu_seconds(), "operator": self.operator.cpu_seconds()}

    def spent_s(self) -> dict[str, float]:
        """CPU-seconds since `begin`, by program."""
        return {name: now - self.cpu_s.get(name, 0.0) for name, now in self.cpu().items()}

    def peak_mib(self) -> float:
        """Of the operator's memory."""
        assert self.operator.process is not None
        text = Path(f"/proc/{self.operator.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024


@contextmanager
def bench(log: Path) -> Iterator[Bench]:
    """A fresh control plane with nodes that only look like some, and the operator beside it."""
    with running.control_plane(audit=True) as plane:
        install_crd(plane)
        with (
            plane.namespace("operator") as own,
            plane.fake_nodes(NODES, pods_per_node=PODS_PER_NODE),
        ):
            operator = Running(plane, own, log)
            try:
                operator.started()
                yield Bench(plane, operator, own)
            finally:
                operator.end()


def pods_made(found: list[Asked], namespace: str) -> list[float]:
    """Moments at which pods were created."""
    return [
        a.at_s
        for a in found
        if (a.verb, a.kind, a.namespace) == (POST, "pods", namespace) and a.code == 201
    ]


def first(found: list[Asked], namespace: str, kind: str) -> float:
    return min(a.at_s for a in found if (a.kind, a.verb, a.namespace) == (kind, POST, namespace))


def gone(bench: Bench, namespace: str, seconds: float) -> None:
    """Until no pod of the namespace is left."""
    path = f"/api/v1/namespaces/{namespace}/pods?limit=1"
    until(lambda: not bench.plane.api.get(path)["items"], "all pods are gone", seconds)


def indexed_job(name: str, workers: int) -> dict[str, Any]:
    """The same worker pods as a plain Indexed Job makes them."""
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
