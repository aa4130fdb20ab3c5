"""The cost of a job with 8 workers for the API server: requests and bytes sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from paceline_api.crdgen import PLURAL
from paceline_api.names import LABEL_SLOT
from paceline_operator.core.job import read_job
from paceline_operator.core.observed import Observed, Sent
from paceline_operator.core.report.status import ARRIVALS_S, COALESCE_S, STARTING_S, due

from testing.fake_cluster.world import NAMESPACE, START_S, World, job_body

WORKERS = 8
POD_BYTES = 3_500
"""Limit for a worker's manifest with the volumes that prove its identity and the security settings
of each container. No template is smaller than the one here."""
STATUS_BYTES = 2_200
ROW_BYTES = 125
"""Limit for the row of one rank in the status."""


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_the_start_of_a_job_sends_few_and_small_requests(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[str] = Counter()
    create, apply = world.server.create, world.server.apply

    async def weigh_create(
        kind: str, namespace: str, manifest: Mapping[str, Any], **how: Any
    ) -> Any:
        sent[kind] += len(msgspec.json.encode(manifest))
        return await create(kind, namespace, manifest, **how)

    async def weigh_apply(
        kind: str, namespace: str, manifest: Mapping[str, Any], **how: Any
    ) -> Any:
        sent[kind] += len(msgspec.json.encode(manifest))
        return await apply(kind, namespace, manifest, **how)

    monkeypatch.setattr(world.server, "create", weigh_create)
    monkeypatch.setattr(world.server, "apply", weigh_apply)
    world.server.insert(PLURAL, NAMESPACE, job_body(replicas=WORKERS))
    world.settle(5, step_s=0.05)
    asked = world.server.requests
    assert world.server.find(PLURAL, NAMESPACE, "digits")["status"]["ready"] == "8/8"
    assert asked["PATCH trainingjobs/status"] == 2, "one at the start, one when the ring is formed"
    # The operator reads the Service before it writes: another owner may use that name.
    assert asked.total() == (WORKERS + 1) + 1 + 2 + 2 + 1, "pods, Secret, Service, status, Event"
    assert sent["pods"] <= (WORKERS + 1) * POD_BYTES
    assert sent[PLURAL] <= 2 * (STATUS_BYTES + WORKERS * ROW_BYTES)


def test_workers_that_start_one_by_one_share_status_writes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = world._bind

    def late(name: str, body: dict[str, Any]) -> None:
        slot = int(body["metadata"]["labels"].get(LABEL_SLOT, 0))
        if world.now_s >= START_S + 0.2 * slot:
            bind(name, body)

    monkeypatch.setattr(world, "_bind", late)
    world.server.insert(PLURAL, NAMESPACE, job_body(replicas=WORKERS))
    world.settle(5, step_s=0.05)
    assert world.server.find(PLURAL, NAMESPACE, "digits")["status"]["ready"] == "8/8"
    assert world.server.requests["PATCH trainingjobs/status"] <= 5


def status(
    ready: int = 0, *, placed: bool = False, ring: bool = False, **others: Any
) -> dict[str, Any]:
    return {
        "ready": f"{ready}/8",
        "readyReplicas": ready,
        "activeRanks": ready,
        "membershipGeneration": f"1.{ready}",
        "conditions": [
            {"type": "Scheduled", "status": str(placed)},
            {"type": "RingReady", "status": str(ring)},
        ],
        **others,
    }


@pytest.mark.parametrize(
    ("before", "after", "wait_s"),
    [
        (status(2), status(5), STARTING_S),
        (status(), status(placed=True), STARTING_S),
        (status(5, ring=True), status(7, ring=True), ARRIVALS_S),
        (status(5), status(4), COALESCE_S),
        (status(5, placed=True), status(5), COALESCE_S),
        (status(2), status(8, ring=True), COALESCE_S),
        (status(2), status(5, highestAttempt=2), COALESCE_S),
    ],
)
def test_only_arrivals_of_workers_delay_a_status_write(
    before: dict[str, Any], after: dict[str, Any], wait_s: float
) -> None:
    observed = Observed(sent=Sent(status_s=100.0))
    body = job_body(replicas=WORKERS)
    meta = {"uid": "1", "generation": 1, "creationTimestamp": "2026-11-23T08:00:00Z"}
    body["metadata"] |= meta | {"namespace": NAMESPACE}
    job = read_job(body | {"status": before})
    assert due(job, after, observed, 100.0 + wait_s - 0.01) == (False, 100.0 + wait_s)
    assert due(job, after, observed, 100.0 + wait_s) == (True, None)
