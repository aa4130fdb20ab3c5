"""The transport of the gradients: what is reported, and when the job must fail."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from paceline_api.times import timestamp
from paceline_api.types.enums import Network
from paceline_operator.core.changes import Changes
from paceline_operator.core.clocks import CarrierUnknown, Clocks
from paceline_operator.core.decide import transport
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed
from paceline_operator.core.pods.frozen import job_file
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.report import status

from testing.fake_cluster.observations import (
    NOW,
    RUNNING,
    coordinator_status,
    job_of,
    read,
    training,
    worker,
)

RDMA = {"required": "RDMA"}
SHOWN = {**RDMA, "preflight": {"enabled": False}}
"""RDMA is required, but the preflight check is off, so that no job fails for it."""
LIMIT_S = 120


def seen_over(carrier: str | None, *carriers: str, kind: str = "mpi", **fields: Any) -> Observed:
    """Return an observation with the `carrier` of the job and the `carriers` of its ranks."""
    observed = training(max(2, len(carriers)))
    assert observed.coordinator is not None
    each = carriers or (carrier or "",) * len(observed.coordinator.ranks)
    ranks = tuple(
        structs.replace(rank, carrier=Network(network))
        for rank, network in zip(observed.coordinator.ranks, each, strict=True)
    )
    network = None if carrier is None else Network(carrier)
    spoken = structs.replace(
        observed.coordinator, ranks=ranks, transport=kind, carrier=network, **fields
    )
    return replace(observed, coordinator=spoken)


def job_with(fabric: dict[str, Any] | None = None, /, **moved: str) -> JobObject:
    """Return a job whose status.transport so far is `moved`."""
    before = {**RUNNING, "replicas": 2}
    if moved:
        before["transport"] = moved
    return job_of(before, replicas=2, **({"fabric": fabric} if fabric else {}))


def decided(job: JobObject, observed: Observed, now_s: float = NOW) -> Changes:
    changes = reconcile(job, observed, now_s)
    assert reconcile(job, observed, now_s) == changes, "the same facts give the same answer"
    return changes


def condition(changes: Changes, kind: str = "TransportVerified") -> dict[str, Any]:
    assert changes.status is not None
    return next(c for c in changes.status["conditions"] if c["type"] == kind)


def failed(changes: Changes) -> str:
    """Return why the job has failed; empty if it has not."""
    held = [] if changes.status is None else changes.status["conditions"]
    ends = [c for c in held if c["type"] == "Failed"]
    if not ends:
        return ""
    assert ends[0]["reason"] == "PreflightFailed"
    assert [(e.reason, e.warning) for e in changes.events] == [("PreflightFailed", True)]
    return str(ends[0]["message"])


# ---- reports of the coordinator (C14) -----------------------------------------------------------


def test_carriers_are_read_from_the_answer_of_the_coordinator() -> None:
    rank = {"member": [1, 0, 2000], "state": "active", "rank": 1, "carrier": "RDMA"}
    answer = read({"transport": "mpi", "carrier": "RDMA", "ranks": [rank]})
    assert (answer.carrier, answer.ranks[0].carrier) == ("RDMA", "RDMA")
    assert read({"carrier": ""}).carrier == ""
    older = read({"ranks": [{"member": [1, 0, 2000], "state": "active"}]})
    assert (older.carrier, older.ranks[0].carrier) == (None, "")


# ---- status and condition -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fabric", "carrier", "holds", "reason", "kind", "verified"),
    [
        (None, "", "True", "TransportMeasured", "mpi", False),
        (None, "TCP", "True", "TransportMeasured", "mpi over TCP", True),
        (None, None, "True", "TransportMeasured", "mpi", False),
        (RDMA, "RDMA", "True", "TransportMeasured", "mpi over RDMA", True),
        (RDMA, "GPUDirect", "True", "TransportMeasured", "mpi over GPUDirect", True),
        ({"required": "GPUDirect"}, "GPUDirect", "True", "TransportMeasured", None, True),
        (RDMA, "", "False", "TransportPending", "mpi", False),
        (RDMA, None, "False", "TransportDegraded", "mpi", False),
        (SHOWN, "TCP", "False", "TransportDegraded", "mpi over TCP", False),
        (
            {**SHOWN, "required": "GPUDirect"},
            *("RDMA", "False", "TransportDegraded", "mpi over RDMA", False),
        ),
    ],
)
def test_condition_and_status_follow_the_carrier(
    fabric: dict[str, Any] | None,
    carrier: str | None,
    holds: str,
    reason: str,
    kind: str | None,
    verified: bool,
) -> None:
    changes = decided(job_with(fabric), seen_over(carrier))
    assert changes.status is not None
    assert not failed(changes)
    moved = changes.status["transport"]
    assert moved["kind"] == (kind or f"mpi over {carrier}")
    assert moved.get("verifiedAt") == (timestamp(NOW) if verified else None)
    reported = condition(changes)
    assert (reported["status"], reported["reason"]) == (holds, reason)
    assert moved["kind"] in reported["message"]


def test_the_message_names_the_rank_and_what_to_check() -> None:
    changes = decided(job_with(SHOWN), seen_over("TCP", "RDMA", "TCP", "", "TCP"))
    message = condition(changes)["message"]
    assert "rank 1 in digits-1-1 uses TCP, rank 3 in digits-3-1 uses TCP;" in message
    for word in ("digits-0-1", "digits-2-1"):
        assert word not in message
    for word in ("device plugin", "IPC_LOCK", "FI_PROVIDER", "NCCL_IB_"):
        assert word in message
    many = decided(job_with(SHOWN), seen_over("TCP", *["TCP"] * 7))
    assert "and 3 more" in condition(many)["message"]


def test_a_job_of_one_pod_needs_no_carrier() -> None:
    pods = [worker(0)]
    spoken = structs.replace(coordinator_status(pods), transport="mpi")
    job = job_of({**RUNNING, "replicas": 1}, replicas=1, minReplicas=1, fabric=RDMA)
    observed = replace(training(1), coordinator=spoken)
    changes = decided(job, observed, NOW + 10 * LIMIT_S)
    assert not failed(changes)
    assert condition(changes)["status"] == "True"
    assert "within one pod" in condition(changes)["message"]
    assert changes.status is not None
    assert changes.status["transport"] == {"kind": "mpi"}


def test_an_unknown_transport_is_not_reported() -> None:
    changes = decided(job_with(RDMA), seen_over("", kind=""))
    assert changes.status is not None
    assert "transport" not in changes.status
    assert not any(c["type"] == "TransportVerified" for c in changes.status["conditions"])


# ---- writes of the status (C12) -----------------------------------------------------------------


def stored(job: JobObject, changes: Changes) -> JobObject:
    assert changes.status is not None
    return replace(job, status=dict(changes.status))


def later(observed: Observed, since_s: float) -> Observed:
    """Return `observed` with a status that was last written at `since_s`."""
    return replace(observed, sent=replace(observed.sent, status_s=since_s, figures_s=since_s))


def test_a_carrier_that_is_not_required_causes_no_status_write() -> None:
    job = job_with()
    job = stored(job, decided(job, seen_over("")))
    observed = later(seen_over("TCP"), NOW)
    assert decided(job, observed, NOW + status.WORDS_S + 1).status is None
    written = decided(job, observed, NOW + status.FIGURES_S)
    assert written.status is not None
    assert written.status["transport"]["kind"] == "mpi over TCP"
    job = stored(job, written)
    again = later(observed, NOW + status.FIGURES_S)
    assert decided(job, again, NOW + 3 * status.FIGURES_S).status is None


def test_a_required_carrier_is_written_when_it_changes_and_not_again() -> None:
    job = job_with(SHOWN)
    job = stored(job, decided(job, seen_over("")))
    at_s = NOW + 1
    for carrier in ("RDMA", "TCP", "RDMA"):
        observed = later(seen_over(carrier), at_s - 1)
        changes = decided(job, observed, at_s)
        assert changes.status is not None, carrier
        assert changes.status["transport"]["verifiedAt"] == timestamp(NOW + 1), "the first time"
        job = stored(job, changes)
        assert decided(job, later(observed, at_s), at_s + 10 * status.FIGURES_S).status is None
        at_s += 1


def test_a_joining_rank_without_a_known_carrier_changes_nothing() -> None:
    job = job_with(RDMA, kind="mpi over RDMA", verifiedAt=timestamp(NOW - 60))
    changes = decided(job, seen_over("", "RDMA", ""))
    assert changes.status is not None
    assert changes.status["transport"] == job.status["transport"]
    assert condition(changes)["status"] == "True"
    other = decided(job, seen_over("", kind="nccl"))
    assert other.status is not None
    assert other.status["transport"]["kind"] == "nccl", "another transport, another carrier"


# ---- the backend --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("required", "backend", "used"),
    [
        (None, None, "auto"),
        ("Any", "auto", "auto"),
        ("RDMA", None, "mpi"),
        ("RDMA", "auto", "mpi"),
        ("RDMA", "nccl", "nccl"),
        ("GPUDirect", None, "nccl"),
        ("GPUDirect", "auto", "nccl"),
    ],
)
def test_auto_chooses_a_backend_for_the_required_network(
    required: str | None, backend: str | None, used: str
) -> None:
    spec: dict[str, Any] = {"fabric": {"required": required}} if required else {}
    spec |= {"collective": {"backend": backend}} if backend else {}
    job = job_of(RUNNING, **spec)
    assert job.resolved["collective"]["backend"] == used
    assert json.loads(job_file(job))["backend"] == used


# ---- preflight ----------------------------------------------------------------------------------


def test_tcp_fails_a_job_that_requires_more() -> None:
    message = failed(decided(job_with(RDMA), seen_over("TCP", "RDMA", "TCP")))
    assert "mpi over TCP moves the gradients, but spec.fabric.required is RDMA" in message
    assert "rank 1 in digits-1-1 uses TCP" in message
    assert "fabric.preflight.enabled: false" in message
    direct = failed(decided(job_with({"required": "GPUDirect"}), seen_over("RDMA")))
    assert "rank 0 in digits-0-1 uses RDMA" in direct


def test_tcp_fails_no_job_without_check_or_requirement_or_at_its_end() -> None:
    assert not failed(decided(job_with(SHOWN), seen_over("TCP")))
    assert not failed(decided(job_with(), seen_over("TCP")))
    assert not failed(decided(job_with(RDMA), seen_over("TCP", stopping=True)))


def waiting(carrier: str | None, rounds: int, unknown: CarrierUnknown | None = None) -> Observed:
    return replace(seen_over(carrier, version=rounds), clocks=Clocks(carrier_unknown=unknown))


BEGAN = CarrierUnknown(NOW - LIMIT_S, 9)


def test_the_preflight_timer_starts_with_rounds_and_an_unknown_carrier() -> None:
    first = decided(job_with(RDMA), waiting("", 9))
    assert first.clocks.carrier_unknown == CarrierUnknown(NOW, 9)
    assert first.look_again_s is not None
    assert first.look_again_s <= NOW + LIMIT_S
    kept = decided(job_with(RDMA), waiting("", 50, BEGAN), NOW - 1)
    assert kept.clocks.carrier_unknown == BEGAN
    away = replace(waiting("", 50, BEGAN), coordinator=None)
    assert decided(job_with(RDMA), away).clocks.carrier_unknown == BEGAN
    for observed in (waiting("RDMA", 50, BEGAN), waiting(None, 50, BEGAN)):
        assert decided(job_with(RDMA), observed).clocks.carrier_unknown is None
    assert decided(job_with(), waiting("", 50, BEGAN)).clocks.carrier_unknown is None


def test_a_carrier_still_unknown_at_the_timeout_fails_the_job() -> None:
    assert not failed(decided(job_with(RDMA), waiting("", 50, BEGAN), NOW - 1))
    message = failed(decided(job_with(RDMA), waiting("", 50, BEGAN)))
    assert "after 120 s (fabric.preflight.timeoutSeconds)" in message
    assert "rank 0 in digits-0-1, rank 1 in digits-1-1" in message
    patient = {**RDMA, "preflight": {"timeoutSeconds": 600}}
    assert not failed(decided(job_with(patient), waiting("", 50, BEGAN)))
    assert not failed(decided(job_with(SHOWN), waiting("", 50, BEGAN)))


def test_preflight_waits_for_slow_rounds() -> None:
    """Too few rounds have run for a verdict, and a minute per round is not an error."""
    few = 9 + transport.MOVING_ROUNDS
    assert not failed(decided(job_with(RDMA), waiting("", few - 1, BEGAN), NOW + 3600))
    assert failed(decided(job_with(RDMA), waiting("", few, BEGAN), NOW + 3600))


def test_a_release_that_reports_no_carrier_fails_no_job() -> None:
    changes = decided(job_with(RDMA), waiting(None, 50, BEGAN), NOW + 3600)
    assert not failed(changes)
    assert "does not look into it" in condition(changes)["message"]


# ---- after verification -------------------------------------------------------------------------


def test_a_later_loss_of_the_carrier_is_reported_once() -> None:
    held = {"type": "TransportVerified", "status": "True", "lastTransitionTime": timestamp(NOW)}
    moved = {"kind": "mpi over RDMA", "verifiedAt": timestamp(NOW - 600)}
    before = {**RUNNING, "replicas": 2, "transport": moved}
    before["conditions"] = [*RUNNING["conditions"], held]
    job = job_of(before, replicas=2, fabric=RDMA)
    changes = decided(job, seen_over("TCP", "RDMA", "TCP"))
    assert not failed(changes)
    assert condition(changes)["reason"] == "TransportDegraded"
    (event,) = (e for e in changes.events if e.reason == "TransportDegraded")
    assert event.warning
    assert "rank 1 in digits-1-1 uses TCP" in event.message
    degraded = stored(job, changes)
    assert not failed(decided(degraded, seen_over("TCP")))
    again = decided(degraded, seen_over("TCP"))
    assert not [e for e in again.events if e.reason == "TransportDegraded"]
    assert not [e for e in decided(job, seen_over("RDMA")).events if "ransport" in e.reason]
    assert not failed(decided(job, waiting("", 50, BEGAN), NOW + 3600)), "it was RDMA before"


def test_suspending_a_job_resets_the_transport_check() -> None:
    moved = {"kind": "mpi over RDMA", "verifiedAt": timestamp(NOW - 600)}
    job = job_of({**RUNNING, "transport": moved}, replicas=2, suspend=True, fabric=RDMA)
    changes = decided(job, Observed())
    assert changes.status is not None
    assert "transport" not in changes.status
