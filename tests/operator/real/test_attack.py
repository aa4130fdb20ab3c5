"""One coordinator gives hostile answers to every request, and a hundred other jobs train."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import (
    JOBS,
    LEASES,
    Running,
    holder,
    holds,
    job,
    operator_of,
    submit,
    until,
)
from testing.fake_cluster.stub import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(900)]

OTHERS = 100
REFUSED = "paceline_operator_answers_refused_total"
MORE_MIB = 120
"""Memory that the attack may cost the operator; without bounds it was 830 MiB."""
LISTS = b'{"seq":1,"ranks":[' + b"[]," * (10 * 2**20) + b"[]]}"
"""The attack that took the operator down: 30 MiB of empty lists. They were accepted because the
job's spec asked for 10,000 replicas of 256 processes."""


@pytest.fixture
def running(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Running]:
    with operator_of(plane, namespace, tmp_path / "operator.log") as operator:
        yield operator


def rounds(plane: ControlPlane, namespace: str) -> dict[str, int]:
    """Return the round in the status of each job."""
    items = plane.api.items(JOBS.format(namespace))
    return {
        item["metadata"]["name"]: int(item.get("status", {}).get("round") or 0) for item in items
    }


def lease(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    spec: dict[str, Any] = plane.api.get(LEASES.format(namespace) + "/paceline-operator")["spec"]
    return spec


def refused(operator: Running) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(REFUSED))


def test_a_hundred_jobs_train_while_one_gives_hostile_answers(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    others = {f"good-{n}" for n in range(OTHERS)}
    with plane.fake_nodes(3), Fleet(plane, namespace) as fleet:
        size = {"replicas": 1, "minReplicas": 1}
        submit(plane, namespace, "evil", **size, maxReplicas=10_000, procsPerReplica=256)
        for name in sorted(others):
            submit(plane, namespace, name, **size)
        until(lambda: fleet.serving == OTHERS + 1, "all coordinators", 300)

        def all_train() -> bool:
            fleet.train()
            time.sleep(1.0)
            latest = rounds(plane, namespace)
            return all(latest.get(name, 0) > 0 for name in others)

        until(all_train, "all jobs train", 300)
        assert running.process is not None
        before, memory_mib = lease(plane, namespace), running.memory_mib()

        fleet.hostile["evil"] = LISTS
        until(lambda: refused(running) >= 3, "the attack", 60)
        since = rounds(plane, namespace)

        def all_advance() -> bool:
            fleet.train()
            time.sleep(1.0)
            latest = rounds(plane, namespace)
            return all(latest[name] > since[name] for name in others)

        until(all_advance, "each other job's status is of this minute", 200)
        degraded = until(
            lambda: holds(job(plane, namespace, "evil"), "Degraded"), "the attacker is told", 30
        )
        assert degraded["reason"] == "AnswerRefused"
        after = lease(plane, namespace)
        assert holder(plane, namespace) == "one"
        assert after["leaseTransitions"] == before["leaseTransitions"]
        assert after["renewTime"] > before["renewTime"]
        assert running.process.poll() is None
        assert running.memory_mib("VmHWM") < memory_mib + MORE_MIB
        asked = refused(running)
        lines = [line for line in running.log.read_text().splitlines() if "was refused" in line]
        assert asked > len(lines), "each answer is counted, one line a minute tells of them"
        assert len(lines) <= 6
        for name in others:
            assert not holds(job(plane, namespace, name), "Degraded"), name
        assert fleet.wrong == []
