"""Two operators: one acts, and the other takes over when it is killed, paused or stopped."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from testing.cluster.audit import entries
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import (
    WRITES,
    Running,
    change,
    holder,
    living,
    own_requests,
    pods,
    submit,
    until,
    until_quiet,
)
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes

LEASE_S = 4
LONG_LEASE_S = 600
"""A duration whose end no test waits for."""

Pair = dict[str, Running]


@pytest.fixture
def pair(
    plane: ControlPlane, namespace: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    """Run two operators as different users; `one` leads. The parameter is the Lease duration."""
    operators: Pair = {}
    lease_s = getattr(request, "param", LEASE_S)
    try:
        for name in ("one", "two"):
            log = tmp_path / f"{name}.log"
            running = operators[name] = Running(plane, namespace, log, user=f"operator-{name}")
            running.start(f"--lease-duration={lease_s}", identity=name)
            if name == "one":
                until(lambda: holder(plane, namespace) == "one", "one leads")
        until(lambda: "acting for" in operators["one"].log.read_text(), "one acts")
        until(
            lambda: "Initial authentication has finished" in operators["two"].log.read_text(), "two"
        )
        yield operators
    finally:
        for name, running in operators.items():
            running.end()
            lines = running.log.read_text().splitlines()[-40:]
            sys.stdout.write("\n".join([f"---- log of {name}", *lines, ""]))


def keep_running(running: Running, name: str) -> None:
    """Start an operator again that has lost its lead, as the kubelet does."""
    assert running.process is not None
    if (code := running.process.poll()) is not None:
        assert code == 3
        running.start(f"--lease-duration={LEASE_S}", identity=name)


def writes_of(plane: ControlPlane, user: str, since_s: float) -> list[str]:
    """Return the writes of a user since a moment, except those to its Lease."""
    assert plane.audit_log is not None
    writes = []
    for entry in entries(plane.audit_log):
        if entry["user"].get("username") != user or entry["verb"] not in WRITES:
            continue
        what = entry["objectRef"]
        asked_s = datetime.fromisoformat(entry["requestReceivedTimestamp"]).timestamp()
        if asked_s >= since_s and what["resource"] != "leases":
            code = entry["responseStatus"]["code"]
            writes.append(f"{entry['verb']} {what['resource']} {what.get('name')} {code}")
    return writes


def names(slots: Iterable[int], attempt: int = 1) -> list[str]:
    return sorted(f"digits-{slot}-{attempt}" for slot in slots)


@pytest.mark.exhaustive
def test_a_standby_takes_over_from_a_killed_leader(
    plane: ControlPlane, namespace: str, pair: Pair
) -> None:
    with plane.fake_nodes(2), Fleet(plane, namespace) as fleet:
        submit(plane, namespace, replicas=2)
        until(lambda: len(living(plane, namespace)) == 2, "2 workers")
        pair["one"].stop(signal.SIGKILL)
        change(plane, namespace, replicas=4)
        until(lambda: len(living(plane, namespace)) == 4, "4 workers")
        # The status may or may not have recorded the start by then.
        workers = living(plane, namespace)
        assert workers in (names(range(4)), names((0, 1)) + names((2, 3), 2))
        until(lambda: (r := fleet.ring()) and r.replicas == 4, "it is told")
        assert len(pods(plane, namespace, "coordinator")) == 1
        assert fleet.wrong == []


def test_a_paused_leader_is_replaced_and_writes_nothing_when_it_wakes(
    plane: ControlPlane, namespace: str, pair: Pair
) -> None:
    with plane.fake_nodes(2), Fleet(plane, namespace) as fleet:
        submit(plane, namespace, replicas=2)
        until(lambda: len(living(plane, namespace)) == 2, "2 workers")
        until(lambda: "RingFormed" in pair["one"].log.read_text(), "the ring")
        # Wait until it is idle: a request that has passed the Lease check cannot be recalled.
        asked_by_one = partial(own_requests, plane, namespace, user="operator-one")
        until_quiet(lambda: asked_by_one().total(), 0.5, 60.0, at_most=0)
        pair["one"].send(signal.SIGSTOP)
        # It will wake with these events in its buffers, and with a view in which 2 are wanted.
        change(plane, namespace, replicas=5)
        plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/digits-0-1")
        # The status has recorded the start, so new slots begin above its highest attempt.
        wanted = sorted([*names((1,)), *names((0, 2, 3, 4), 2)])
        until(lambda: living(plane, namespace) == wanted, "5 workers")
        ring = fleet.ring()
        assert ring is not None
        until(lambda: ring.replicas == 5 and len(ring.members) == 5, "all 5 train")
        targets = len(ring.targets)

        woken_s = time.time()
        pair["one"].send(signal.SIGCONT)
        process = pair["one"].process
        assert process is not None
        assert process.wait(60) == 3, "a deposed leader ends"
        assert writes_of(plane, "operator-one", woken_s) == []
        assert len(ring.targets) == targets, "it spoke to the coordinator"
        assert living(plane, namespace) == wanted
        assert fleet.wrong == []

        # After a restart it stands by, and takes over when the other one stops.
        pair["one"].start(f"--lease-duration={LEASE_S}", identity="one")
        read_log = pair["one"].log.read_text
        until(lambda: read_log().count("Initial authentication has finished") == 2, "it is up")
        pair["two"].stop()
        until(lambda: holder(plane, namespace) == "one", "one leads again")


@pytest.mark.exhaustive
def test_a_leader_paused_during_its_writes_duplicates_nothing(
    plane: ControlPlane, namespace: str, pair: Pair
) -> None:
    count = 150
    with plane.fake_nodes(2):
        submit(plane, namespace, replicas=count)
        until(lambda: len(pods(plane, namespace)) >= 15, "some workers")
        pair["one"].send(signal.SIGSTOP)
        made = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods(plane, namespace)}
        assert len(made) < count, "too late to be in the middle"

        def all_workers() -> bool:
            keep_running(pair["two"], "two")
            return len(living(plane, namespace)) == count

        until(all_workers, "all workers", 240)
        pair["one"].send(signal.SIGCONT)
        process = pair["one"].process
        assert process is not None
        assert process.wait(60) == 3
        assert living(plane, namespace) == names(range(count))
        now = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods(plane, namespace)}
        assert {name: now[name] for name in made} == made, "a child was made anew"
        assert len(pods(plane, namespace, "coordinator")) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", [LONG_LEASE_S], indirect=True)
def test_a_leader_that_exits_hands_over_at_once(
    plane: ControlPlane, namespace: str, pair: Pair
) -> None:
    """An update of the operator leaves no gap of the Lease's duration."""
    assert pair["one"].stop() == 0
    until(lambda: holder(plane, namespace) == "two", "two leads")
