"""Ready and Stalled: how GitOps tools read a job by the rules of kstatus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline_api.crdgen import PLURAL
from paceline_api.reasons import ConditionType, Reason
from paceline_operator.core.observed import Observed
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.refusals import CreationRefusal, RefusalKind
from paceline_operator.core.report.conditions import WantedCondition
from paceline_operator.core.report.standing import NEEDS_SOMEBODY, standing

from testing.fake_cluster.kstatus import Standing, kstatus
from testing.fake_cluster.observations import NOW, RUNNING, job_of, training
from testing.fake_cluster.world import NAMESPACE, World, job_body

T, R = ConditionType, Reason
CURRENT, IN_PROGRESS, FAILED = Standing.CURRENT, Standing.IN_PROGRESS, Standing.FAILED


def held(kind: ConditionType, reason: str = "Reason", *, holds: bool = True) -> WantedCondition:
    return WantedCondition(kind, holds, reason, f"{kind} says why")


def of(*conditions: WantedCondition) -> tuple[Standing, WantedCondition, WantedCondition]:
    """Return kstatus's reading of a job with these conditions, and its Ready and Stalled."""
    ready, stalled = standing({}, list(conditions))
    bodies = [{"type": c.type, "status": str(c.holds)} for c in (*conditions, ready, stalled)]
    body = {
        "metadata": {"generation": 1},
        "status": {"observedGeneration": 1, "conditions": bodies},
    }
    return kstatus(body), ready, stalled


RING = held(T.RING_READY)
NO_RING = held(T.RING_READY, R.SETTLING, holds=False)
PLACED = held(T.SCHEDULED)
TABLE = [
    ((), IN_PROGRESS, R.STARTING),
    ((held(T.SCHEDULED, R.QUEUED, holds=False), NO_RING), IN_PROGRESS, R.QUEUED),
    ((held(T.SCHEDULED, R.UNSCHEDULABLE, holds=False), NO_RING), IN_PROGRESS, R.UNSCHEDULABLE),
    ((PLACED, NO_RING), IN_PROGRESS, R.SETTLING),
    ((PLACED, held(T.RING_READY, R.SUSPENDED_BY_SPEC, holds=False)), IN_PROGRESS, R.STARTING),
    ((NO_RING, held(T.DEGRADED, R.QUOTA_EXCEEDED)), IN_PROGRESS, R.QUOTA_EXCEEDED),
    ((PLACED, RING), CURRENT, R.TRAINING),
    ((PLACED, RING, held(T.RESIZING)), CURRENT, R.TRAINING),
    ((PLACED, RING, held(T.DEGRADED, R.RANK_SLOW)), CURRENT, R.TRAINING),
    ((PLACED, RING, held(T.DEGRADED, R.POD_NOT_STARTING)), CURRENT, R.TRAINING),
    ((RING, held(T.DEGRADED, R.WAITING_FOR_EVIDENCE)), IN_PROGRESS, R.WAITING_FOR_EVIDENCE),
    ((RING, held(T.DEGRADED, R.SPEC_INVALID)), FAILED, R.SPEC_INVALID),
    ((NO_RING, held(T.DEGRADED, R.TEMPLATE_INVALID)), FAILED, R.TEMPLATE_INVALID),
    ((NO_RING, held(T.DEGRADED, R.FABRIC_UNAVAILABLE)), FAILED, R.FABRIC_UNAVAILABLE),
    ((NO_RING, held(T.DEGRADED, R.SCHEDULER_UNAVAILABLE)), FAILED, R.SCHEDULER_UNAVAILABLE),
    ((PLACED, held(T.DEGRADED, R.SCHEDULER_UNAVAILABLE)), IN_PROGRESS, R.SCHEDULER_UNAVAILABLE),
    ((NO_RING, held(T.DEGRADED, R.POD_NOT_STARTING)), FAILED, R.POD_NOT_STARTING),
    ((RING, held(T.SUSPENDED, R.SUSPENDING)), IN_PROGRESS, R.SUSPENDING),
    ((NO_RING, held(T.SUSPENDED, R.SUSPENDED_BY_SPEC)), CURRENT, R.SUSPENDED_BY_SPEC),
    ((NO_RING, held(T.COMPLETE, R.JOB_FINISHED)), CURRENT, R.JOB_FINISHED),
    ((NO_RING, held(T.FAILED, R.STATE_LOST)), FAILED, R.STATE_LOST),
]


@pytest.mark.parametrize(("conditions", "as_read", "reason"), TABLE)
def test_kstatus_reads_each_state_of_a_job_as_intended(
    conditions: tuple[WantedCondition, ...], as_read: Standing, reason: Reason
) -> None:
    state, ready, stalled = of(*conditions)
    assert (state, ready.reason) == (as_read, reason)
    if stalled.holds:
        assert (stalled.reason, stalled.message) == (ready.reason, ready.message)


CONDITIONS = st.builds(
    WantedCondition,
    st.sampled_from([kind for kind in T if kind not in (T.READY, T.STALLED)]),
    st.booleans(),
    st.sampled_from(list(R)),
    st.just("why"),
)


@pytest.mark.long
@given(st.lists(CONDITIONS, unique_by=lambda c: c.type))
def test_ready_and_stalled_give_exactly_one_verdict(conditions: list[WantedCondition]) -> None:
    state, ready, stalled = of(*conditions)
    holding = {c.type for c in conditions if c.holds}
    assert not (ready.holds and stalled.holds)
    assert state is (CURRENT if ready.holds else FAILED if stalled.holds else IN_PROGRESS)
    assert ready.reason, "a condition without a reason is refused by the API server"
    if T.COMPLETE in holding:
        assert state is CURRENT
    elif T.FAILED in holding:
        assert state is FAILED
    elif stalled.holds:
        assert stalled.reason in NEEDS_SOMEBODY


@pytest.mark.long
@given(st.lists(CONDITIONS, unique_by=lambda c: c.type), st.data())
def test_stored_conditions_count_until_newer_ones_replace_them(
    conditions: list[WantedCondition], data: st.DataObject
) -> None:
    newer = data.draw(st.integers(0, len(conditions)))
    older = {c.type: c for c in conditions[newer:]}
    outdated = {
        c.type: WantedCondition(c.type, not c.holds, "Old", "old") for c in conditions[:newer]
    }
    assert standing({**older, **outdated}, conditions[:newer]) == standing({}, conditions)


def body_of(status: Mapping[str, Any] | None) -> dict[str, Any]:
    assert status is not None
    return {"metadata": {"generation": job_of().generation}, "status": status}


def test_a_refused_template_fails_a_new_job_but_not_a_running_one() -> None:
    refusal = CreationRefusal(RefusalKind.TEMPLATE, "spec.x: wrong", at_s=NOW, generation=3)
    changes = reconcile(job_of(), Observed(refusal=refusal), NOW)
    assert kstatus(body_of(changes.status)) is FAILED
    # The pods that run train on.
    changes = reconcile(job_of(RUNNING), training(refusal=refusal), NOW)
    assert kstatus(body_of(changes.status)) is CURRENT


def test_an_invalid_change_of_the_spec_is_read_as_failed() -> None:
    changes = reconcile(job_of(RUNNING, minReplicas=9), training(), NOW)
    assert kstatus(body_of(changes.status)) is FAILED


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def now(world: World) -> tuple[Standing, str]:
    body = world.server.find(PLURAL, NAMESPACE, "digits")
    ready = next(c for c in body["status"]["conditions"] if c["type"] == "Ready")
    assert ready["observedGeneration"] == body["metadata"]["generation"]
    return kstatus(body), ready["reason"]


def test_kstatus_follows_the_life_of_a_job(world: World) -> None:
    world.server.insert(PLURAL, NAMESPACE, job_body())
    world.settle(0.1)
    assert now(world) == (IN_PROGRESS, R.STARTING)
    world.settle(5)
    assert now(world) == (CURRENT, R.TRAINING)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": True})
    world.settle(60)
    assert now(world) == (CURRENT, R.SUSPENDED_BY_SPEC)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"suspend": False})
    world.settle(0.2)
    assert now(world) == (IN_PROGRESS, R.STARTING)
    world.settle(10)
    assert now(world) == (CURRENT, R.TRAINING)
    world.finish()
    world.settle(60)
    assert now(world) == (CURRENT, R.JOB_FINISHED)


DOCS = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()


def test_every_reason_to_be_stalled_is_documented() -> None:
    section = DOCS[DOCS.index("## From Flux") :]
    rows = dict(re.findall(r"^\| ([^|]+) \| (Current|InProgress|Failed)", section, re.M))
    assert set(rows.values()) == {CURRENT, IN_PROGRESS, FAILED}
    failed = " ".join(row for row, read in rows.items() if read == FAILED)
    assert [reason for reason in NEEDS_SOMEBODY if reason not in failed] == []
