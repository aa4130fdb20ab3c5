"""Figures of a job's status, from the answer of a coordinator as the runtime encodes it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from paceline.core.status import Fact
from paceline_api.ids import MemberId
from paceline_api.status import LogStatus, Outcome, RankPhase, RankStatus, Status
from paceline_api.times import timestamp
from paceline_api.types.status import TrainingJobStatus
from paceline_operator.core.coordinator_status import (
    AnswerError,
    read_coordinator_status,
)
from paceline_operator.core.observed import Observed
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.report import status

from testing.fake_cluster.observations import (
    MANY,
    NOW,
    RUNNING,
    job_of,
    rank_status,
    read,
    training,
)

WHY = "mpi:ring 300 us at 1048576 B; next: gloo 610 us"


def status_of(before: dict[str, Any], answer: Status, **spec: Any) -> TrainingJobStatus:
    """Return the status that the operator writes after this answer."""
    observed = training(2)
    assert observed.coordinator is not None
    parsed = structs.replace(read(answer), ranks=observed.coordinator.ranks)
    changes = reconcile(job_of(before, **spec), replace(observed, coordinator=parsed), NOW)
    assert changes.status is not None
    return TrainingJobStatus.model_validate(dict(changes.status), by_alias=True)


def answer(**fields: Any) -> Status:
    return Status("digits", "coordinator-uid", replicas=2, version=9, **fields)


@pytest.mark.parametrize(("before", "reported", "ranks"), [(0, 3, 3), (5, 3, 5), (0, 0, 0)])
def test_the_restart_count_of_ranks_never_decreases(before: int, reported: int, ranks: int) -> None:
    """A new coordinator knows only of pods that it has met."""
    written = status_of({**RUNNING, "restarts": {"ranks": before}}, answer(restarts=reported))
    assert written.restarts is not None
    assert written.restarts.ranks == ranks


@pytest.mark.parametrize(("left_s", "eta"), [(89.6, 90), (None, None)])
def test_progress_has_percent_and_remaining_seconds(left_s: float | None, eta: int | None) -> None:
    written = status_of(RUNNING, answer(log=LogStatus(progress=0.25, left_s=left_s)))
    assert written.progress is not None
    assert (written.progress.percent, written.progress.eta_seconds) == (25, eta)


def test_a_job_that_does_not_run_has_no_remaining_time() -> None:
    before = {**RUNNING, "progress": {"percent": 25, "etaSeconds": 90}}
    job = job_of(before, suspend=True)
    suspended = reconcile(job, replace(training(2), pods=(), coordinator=None), NOW)
    assert suspended.status is not None
    assert suspended.status["progress"] == {"percent": 25}
    active = {**before, "activeTime": timestamp(NOW - 5)}
    failed = reconcile(job_of(active, activeDeadlineSeconds=1), training(2), NOW)
    assert failed.status is not None
    assert failed.status["progress"] == {"percent": 25}


def row(slot: int, **fields: Any) -> RankStatus:
    return RankStatus(MemberId(slot, 0, 1000), RankPhase.ACTIVE, **fields)


def test_the_status_lists_living_ranks_with_their_figures() -> None:
    facts = {str(Fact.STEP_S): 0.0123, str(Fact.LAG_S): 0.0004}
    rows = ranks_of(
        row(1, version=9, pid=77, facts=facts),
        row(0),
        RankStatus(MemberId(2, 0, 1000), RankPhase.DEAD),
        shares={"1.0#1000": 0.875},
    )
    assert rows == [
        {"member": "0.0#1000", "state": "active", "round": 0},
        {
            "member": "1.0#1000",
            "state": "active",
            "round": 9,
            "pid": 77,
            "stepMicroseconds": 12_300,
            "lagMicroseconds": 400,
            "sharePercent": 88,
        },
    ]


def test_the_status_lists_the_64_ranks_with_the_largest_lag() -> None:
    late = [row(n, facts={str(Fact.LAG_S): n / 1e3}) for n in range(200)]
    rows = ranks_of(*late)
    assert [one["member"] for one in rows] == [f"{n}.0#1000" for n in range(136, 200)]


hostile = st.floats() | st.integers() | st.text(max_size=300) | st.none() | st.lists(st.integers())


@pytest.mark.long
@given(st.lists(st.dictionaries(st.sampled_from(["state", "pid", "version"]), hostile)), hostile)
def test_hostile_figures_do_not_make_an_invalid_status(
    rows: list[dict[str, Any]], figure: Any
) -> None:
    facts = {"step_seconds": figure, "lag_seconds": figure}
    ranks = [{"member": [n, 0, n], "facts": facts, **one} for n, one in enumerate(rows)]
    body = {"ranks": ranks, "log": {"round_s": figure, "left_s": figure}}
    parsed = None
    with suppress(AnswerError):
        parsed = read_coordinator_status(json.dumps(body).encode(), MANY)
    if parsed is None:
        return
    observed = replace(training(2), coordinator=parsed)
    figures = status.figures(observed)
    text = {"ranks": figures["ranks"], "figuresTime": figures["figuresTime"]}
    TrainingJobStatus.model_validate(text, by_alias=True)
    for one in figures["ranks"]:
        assert all(abs(n) <= 2**53 for n in one.values() if isinstance(n, int))


def ranks_of(*ranks: RankStatus, shares: dict[str, float] | None = None) -> list[dict[str, Any]]:
    raw = answer(ranks=ranks, log=LogStatus(shares=shares or {}))
    parsed = read(raw)
    rows: list[dict[str, Any]] = status.figures(replace(training(2), coordinator=parsed))["ranks"]
    return rows


def test_the_status_has_the_measurement_behind_the_transport() -> None:
    written = status_of(RUNNING, answer(transport="mpi", transport_why=WHY))
    assert written.transport is not None
    assert (written.transport.kind, written.transport.message) == ("mpi", WHY)


SLOW = {"rank": 1, "replica": "digits-1-1", "node": "n", "slowdownPercent": 300, "action": "Warn"}
OLD = {**RUNNING, "stragglers": [SLOW], "stragglerCount": 1}


def training_with(*ranks: RankStatus, **more: Any) -> Observed:
    observed = training(2)
    assert observed.coordinator is not None
    return replace(observed, coordinator=structs.replace(observed.coordinator, ranks=ranks, **more))


@pytest.mark.parametrize("complete", [True, False])
def test_the_last_status_has_the_end_of_each_rank_and_no_stragglers(complete: bool) -> None:
    observed = training_with(
        rank_status(0, 1, RankPhase.DEAD, version=9, finished=complete),
        rank_status(1, 1, RankPhase.DEAD, version=4),
        rank_status(7, 1, RankPhase.DEAD, version=2),  # left when the job was scaled down
        rank_status(
            1, 1, RankPhase.FINISHED if complete else RankPhase.ACTIVE, restarts=1, version=9
        ),
        outcome=Outcome(complete, "Complete" if complete else "ScriptFailed", "why"),
    )
    written = reconcile(job_of(OLD), observed, NOW).status
    assert written is not None
    ends = ["finished"] * 2 if complete else ["dead"] * 2
    assert [row["state"] for row in written["ranks"]] == ends
    assert [row["member"] for row in written["ranks"]] == ["0.0#1000", "1.0#1001"]
    assert (written["stragglers"], written["stragglerCount"]) == ([], 0)


def test_a_suspended_job_keeps_the_final_rank_states_until_resumed() -> None:
    observed = training_with(
        rank_status(0, 1, RankPhase.FINISHED, version=9),
        rank_status(1, 1, RankPhase.DEAD, version=9, finished=True),
        outcome=Outcome(True, "Complete", "stopped"),
        stopping=True,
    )
    stops = {"type": "Suspended", "status": "True", "reason": "Suspending"}
    stopping = {**OLD, "conditions": [stops | {"lastTransitionTime": timestamp(NOW)}]}
    asked = job_of(stopping, suspend=True, checkpoint={"path": "/c"})
    first = reconcile(asked, replace(observed, sent=replace(observed.sent, stop_s=NOW)), NOW).status
    assert first is not None
    assert [row["state"] for row in first["ranks"]] == ["finished"] * 2
    assert first["stragglerCount"] == 0
    gone = job_of(dict(first), suspend=True, checkpoint={"path": "/c"})
    later = reconcile(gone, Observed(), NOW + 100).status
    assert later is None or later["ranks"] == first["ranks"]
    resumed = reconcile(
        job_of(dict(first), checkpoint={"path": "/c"}), Observed(), NOW + 200
    ).status
    assert resumed is not None
    assert "ranks" not in resumed
