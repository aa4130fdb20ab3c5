"""One-line builders of the facts that an operator decides from: jobs, pods, coordinator status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec
from paceline_api.times import timestamp
from paceline_operator.core.coordinator_status import (
    CoordinatorStatus,
    Limits,
    Rank,
    read_coordinator_status,
)
from paceline_operator.core.job import Job, read_job
from paceline_operator.core.observed import Observed, Pod, Sent

from testing.fake_cluster.parts import START_S, job_body

NOW = START_S + 1000
UID = "job-uid"
MANY: Final = Limits(ranks=10_000)


def job_of(status: dict[str, Any] | None = None, **spec: Any) -> Job:
    """Return a job with this status and spec."""
    body = job_body(**spec)
    body["metadata"] |= {"uid": UID, "generation": 3, "creationTimestamp": timestamp(START_S)}
    body["status"] = status or {}
    return read_job(body)


def worker(slot: int, attempt: int = 1, **fields: Any) -> Pod:
    """Return a running worker pod; `end` makes it an ended one."""
    base = Pod(
        name=f"digits-{slot}-{attempt}",
        uid=f"pod-{slot}-{attempt}",
        role="worker",
        slot=slot,
        attempt=attempt,
        owner=UID,
        created_s=START_S,
        node=f"node-{slot}",
        phase="Running",
    )
    end = fields.get("end")
    if end is not None:
        fields.setdefault("phase", "Succeeded" if end.in_order else "Failed")
    return replace(base, **fields)


COORDINATOR = Pod(
    "digits-coordinator-1",
    "coordinator-uid",
    "coordinator",
    -1,
    1,
    UID,
    START_S,
    "node-9",
    "Running",
)


def read(answer: Any) -> CoordinatorStatus:
    """Return what the operator reads from a coordinator's answer, after encoding it as JSON."""
    return read_coordinator_status(msgspec.json.encode(answer), MANY)


def coordinator_status(pods: list[Pod], **fields: Any) -> CoordinatorStatus:
    """Return the status in which all ranks of these pods are active."""
    ranks = tuple(Rank(p.slot, 0, p.attempt, "active", i) for i, p in enumerate(pods))
    base = CoordinatorStatus(
        pod_uid="coordinator-uid", generation="1.1", ranks=ranks, version=9, replicas=len(pods)
    )
    return replace(base, **fields)


def training(count: int = 3, **fields: Any) -> Observed:
    """Return the observation of a job that trains with `count` workers."""
    pods = [worker(slot) for slot in range(count)]
    base = Observed(
        pods=(*pods, COORDINATOR),
        coordinator=coordinator_status(pods),
        coordinator_heard_s=NOW,
        sent=Sent(secret=True),
    )
    return replace(base, **fields)


RUNNING: dict[str, Any] = {
    "startTime": timestamp(START_S),
    "replicas": 3,
    "round": 8,
    "highestAttempt": 1,
    "conditions": [
        {"type": "RingReady", "status": "True", "lastTransitionTime": timestamp(START_S)}
    ],
}
