"""One-line builders of the facts that an operator decides from: jobs, pods, coordinator status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec
from paceline_api.ids import ATTEMPT_STRIDE, GenerationId, MemberId
from paceline_api.status import MembershipChange, RankPhase, RankStatus, Status
from paceline_api.times import timestamp
from paceline_api.types.enums import Network
from paceline_operator.core.coordinator_status import (
    StatusLimits,
    read_coordinator_status,
)
from paceline_operator.core.job import JobObject, read_job
from paceline_operator.core.observed import Observed, Pod, Sent

from testing.fake_cluster.parts import START_S, job_body

NOW = START_S + 1000
UID = "job-uid"
MANY: Final = StatusLimits(ranks=10_000)


def job_of(status: dict[str, Any] | None = None, **spec: Any) -> JobObject:
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


def read(answer: Any) -> Status:
    """Return what the operator reads from a coordinator's answer, after encoding it as JSON."""
    return read_coordinator_status(msgspec.json.encode(answer), MANY)


def rank_status(
    slot: int,
    attempt: int,
    state: RankPhase,
    rank: int | None = None,
    *,
    restarts: int = 0,
    **fields: Any,
) -> RankStatus:
    """Return the status of the first rank in the pod with this slot and attempt."""
    member = MemberId(slot, 0, attempt * ATTEMPT_STRIDE + restarts)
    return RankStatus(member, state, rank, **fields)


def coordinator_status(pods: list[Pod], **fields: Any) -> Status:
    """Return the status in which all ranks of these pods are active."""
    ranks = tuple(
        rank_status(pod.slot, pod.attempt, RankPhase.ACTIVE, index)
        for index, pod in enumerate(pods)
    )
    generation = GenerationId(1, "coordinator-uid", 1)
    base = Status(
        coordinator="coordinator-uid",
        generation=generation,
        changes=(MembershipChange(generation),),
        ranks=ranks,
        version=9,
        replicas=len(pods),
        carrier=Network.UNKNOWN,
    )
    return msgspec.structs.replace(base, **fields)


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
