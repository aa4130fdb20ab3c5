"""The status and events of a job, decoded from plain objects of the API server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.status import Fact
from paceline.jobs.core.explain import explain
from paceline.jobs.core.from_cluster import job_events, job_status, latest, time_s
from paceline.jobs.interface import Until
from paceline_api.status import RankPhase

CREATED = "2026-11-23T06:00:00Z"
NOW_S = time_s(CREATED) + 90


def job(state: str | None = "Training", *, spec: Any = None, **status: Any) -> dict[str, Any]:
    given = {"replicas": 2, "procsPerReplica": 2, **(spec or {})}
    meta = {"name": "digits", "namespace": "team", "uid": "u", "creationTimestamp": CREATED}
    reported = {} if state is None else {"state": state, **status}
    return {"metadata": meta, "spec": given, "status": reported}


def pod(slot: int, attempt: int, phase: str = "Running", **more: Any) -> dict[str, Any]:
    name = f"digits-{slot}-{attempt}"
    labels = {
        "paceline.dev/role": "worker",
        "paceline.dev/slot": str(slot),
        "paceline.dev/attempt": str(attempt),
    }
    meta = {"name": name, "uid": name, "labels": labels, **more.pop("metadata", {})}
    return {"metadata": meta, "spec": {"nodeName": "node1"}, "status": {"phase": phase, **more}}


def condition(kind: str, reason: str, message: str = "", status: str = "True") -> dict[str, str]:
    at = "2026-11-23T06:00:30Z"
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": at,
    }


def test_a_model_parallel_group_counts_as_one_rank() -> None:
    status = job_status(
        job(spec={"procsPerReplica": 4, "parallelism": {"model": 2}}), [pod(0, 1)], NOW_S
    )
    assert status.detail is not None
    assert [str(rank.member) for rank in status.detail.ranks] == ["0.0#1000", "0.1#1000"]


def test_the_status_of_a_training_job_is_decoded() -> None:
    status = job_status(
        job(
            readyReplicas=2,
            round=40,
            membershipGeneration="1.3",
            progress={"percent": 25, "etaSeconds": 60},
            transport={"kind": "mpi over TCP", "message": "mpi:ring 300 us at 4096 B"},
            collective={"mode": "Quorum"},
            conditions=[
                condition("Ready", "Training"),
                *(condition("RingReady", "RingFormed"), condition("Scheduled", "Scheduled")),
            ],
        ),
        [pod(1, 1), pod(0, 1)],
        NOW_S,
    )
    assert (status.name, status.place, status.state) == ("digits", "team", "Training")
    assert (status.ready, status.replicas, status.round, status.age_s) == (2, 2, 40, 90)
    assert (status.progress, status.left_s) == (0.25, 60)
    assert status.detail is not None
    assert [rank.state for rank in status.detail.ranks] == [RankPhase.ACTIVE] * 4
    assert [rank.member for rank in status.detail.ranks] == [
        (0, 0, 1000),
        (0, 1, 1000),
        (1, 0, 1000),
        (1, 1, 1000),
    ]
    assert status.detail.settings["mode"] == "Quorum"
    assert (status.detail.transport, status.detail.carrier) == ("mpi", "TCP")
    assert status.detail.transport_why == "mpi:ring 300 us at 4096 B"
    assert (status.detail.generation.incarnation, status.detail.generation.counter) == (1, 3)
    assert status.detail.conditions == ()


def test_a_job_without_status_is_starting() -> None:
    status = job_status(job(None), None, NOW_S)
    assert status.state == "Starting"
    assert status.detail is None
    assert not status.ended


def test_an_unschedulable_job_shows_the_reason_of_its_pods() -> None:
    held = [
        condition("Degraded", "Unschedulable", "0/2 nodes have a GPU"),
        condition("Stalled", "Unschedulable", "0/2 nodes have a GPU"),
    ]
    waits = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}
    ]
    status = job_status(
        job("Unschedulable", readyReplicas=1, conditions=held),
        [pod(0, 1), pod(1, 1, "Pending", conditions=waits), pod(1, 0, "Failed")],
        NOW_S,
    )
    assert status.message == "0/2 nodes have a GPU"
    assert status.detail is not None
    assert [one.type for one in status.detail.conditions] == ["Degraded"], "once is enough"
    states = [(rank.member.slot, rank.state, rank.why) for rank in status.detail.ranks]
    assert states == [
        (0, RankPhase.ACTIVE, ""),
        (0, RankPhase.ACTIVE, ""),
        (1, RankPhase.STARTING, "Unschedulable: no"),
        (1, RankPhase.STARTING, "Unschedulable: no"),
    ]


def test_all_ranks_are_starting_while_it_is_unknown_which_one_is_ready() -> None:
    status = job_status(job("Resizing", readyReplicas=1), [pod(0, 1), pod(1, 2)], NOW_S)
    assert status.detail is not None
    assert {rank.state for rank in status.detail.ranks} == {RankPhase.STARTING}


def test_a_job_is_suspended_once_its_pods_are_gone() -> None:
    body = job("Suspended", spec={"suspend": True})
    assert job_status(body, [pod(0, 1)], NOW_S).state == "Suspending"
    assert job_status(body, [], NOW_S).state == "Suspended"


def test_rank_figures_of_a_replaced_pod_are_ignored() -> None:
    """The state of a running pod is the one that its rank reports."""
    rows = [
        {"member": "0.0#1002", "state": "joining", "stepMicroseconds": 12_300, "round": 8},
        {"member": "1.0#1000", "state": "active", "lagMicroseconds": 5, "sharePercent": 40},
    ]
    body = job("Resizing", spec={"procsPerReplica": 1}, readyReplicas=1, round=9, ranks=rows)
    status = job_status(body, [pod(0, 1), pod(1, 2)], NOW_S)
    assert status.detail is not None
    first, second = status.detail.ranks
    assert (str(first.member), first.state, first.version) == ("0.0#1002", RankPhase.JOINING, 8)
    assert first.facts == {Fact.STEP_S: 0.0123}
    assert (str(second.member), second.facts) == ("1.0#2000", {})


def test_the_age_of_figures_is_reported_while_the_job_runs() -> None:
    at = "2026-11-23T06:01:00Z"
    assert job_status(job(figuresTime=at), None, NOW_S).told_s == 30
    assert job_status(job("Complete", figuresTime=at), None, NOW_S).told_s == 0
    assert job_status(job(), None, NOW_S).told_s == 0


def test_a_failed_job_shows_the_message_of_its_condition() -> None:
    held = [condition("Failed", "ScriptFailed", "rank 1: ValueError")]
    status = job_status(job("Failed", conditions=held), [pod(0, 1, "Failed")], NOW_S)
    assert status.ended
    assert status.message == "rank 1: ValueError"


@pytest.mark.parametrize(
    ("state", "spec", "meta", "shown"),
    [
        ("Training", {"suspend": True}, {}, "Suspending"),
        ("Suspended", {"suspend": True}, {}, "Suspended"),
        ("Suspended", {"suspend": False}, {}, "Starting"),
        ("Complete", {"suspend": True}, {}, "Complete"),
        ("Training", {}, {"deletionTimestamp": CREATED}, "Deleting"),
    ],
)
def test_a_requested_change_shows_before_the_operator_reports_it(
    state: str, spec: Any, meta: Any, shown: str
) -> None:
    body = job(state, spec=spec)
    body["metadata"] |= meta
    assert job_status(body, None, NOW_S).state == shown


@given(
    st.sampled_from(["Starting", "Training", "Suspended", "Complete", "Failed", "Unschedulable"]),
    st.integers(0, 3),
    st.sampled_from(list(Until)),
)
def test_reached_is_true_at_the_awaited_state_or_the_end(
    state: str, ready: int, until: Until
) -> None:
    spec = {"suspend": state == "Suspended"}
    status = job_status(job(state, spec=spec, readyReplicas=ready), None, NOW_S)
    wanted = {
        Until.ENDED: False,
        Until.TRAINING: state == "Training" and ready == 2,
        Until.SUSPENDED: state == "Suspended",
    }[until]
    assert status.meets(until) is (wanted or state in ("Complete", "Failed"))


attempts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), unique=True, max_size=12)


@given(attempts)
def test_latest_returns_the_newest_pod_of_each_slot(places: list[tuple[int, int]]) -> None:
    names = [pod["metadata"]["name"] for pod in latest(pod(*one) for one in places)]
    slots = sorted({slot for slot, _ in places})
    best = [max(attempt for slot, attempt in places if slot == one) for one in slots]
    assert names == [f"digits-{slot}-{n}" for slot, n in zip(slots, best, strict=True)]


def event(name: str, uid: str, at: str, kind: str = "Pod", **more: Any) -> dict[str, Any]:
    about = {"kind": kind, "name": name, "uid": uid}
    return {"metadata": {}, "involvedObject": about, "lastTimestamp": at, "reason": name, **more}


def test_events_include_those_of_the_jobs_deleted_pods() -> None:
    events = [
        event("digits-1-2", "gone", "2026-11-23T06:03:00Z", type="Warning", count=3),
        event("digits", "u", "2026-11-23T06:01:00Z", "TrainingJob", reportingComponent="paceline"),
        event("digits-1-1", "before", "2026-11-23T05:00:00Z"),
        event("digits-too-1-1", "other", "2026-11-23T06:02:00Z"),
        event("digits", "old", "2026-11-23T05:00:00Z", "TrainingJob"),
        event("digits-coordinator-1", "c", "2026-11-23T06:02:00Z", source={"component": "kubelet"}),
    ]
    result = job_events(events, job(), [pod(0, 1)])
    assert [one.reason for one in result] == ["digits", "digits-coordinator-1", "digits-1-2"]
    assert [one.source for one in result][:2] == ["paceline", "kubelet on digits-coordinator-1"]
    assert (result[-1].warning, result[-1].count) == (True, 3)


@pytest.mark.parametrize("state", ["Complete", "Failed", "Suspended"])
def test_an_ended_or_suspended_job_shows_rank_outcomes_and_no_stale_conditions(
    state: str,
) -> None:
    rows: list[dict[str, Any]] = [
        {"member": "0.0#1000", "state": "finished", "round": 9},
        {"member": "1.0#1001", "state": "dead" if state == "Failed" else "finished", "round": 9},
    ]
    conditions = [
        condition(state, "Why", "the end"),
        condition("Resizing", "Scaling", "1 replicas run, 4 are wanted"),
        condition("Degraded", "RankSlow", "rank 1 is slow"),
    ]
    slow = {"rank": 1, "replica": "digits-1-1", "slowdownPercent": 300, "action": "Warn"}
    body = job(
        state,
        spec={"procsPerReplica": 1, "suspend": state == "Suspended"},
        ranks=rows,
        conditions=conditions,
        stragglers=[slow],
    )
    pods = [] if state == "Suspended" else [pod(0, 1), pod(1, 1, "Failed")]
    for kept in ([], pods):
        status = job_status(body, kept, NOW_S)
        assert status.detail is not None
        ends = [(str(rank.member), str(rank.state)) for rank in status.detail.ranks]
        assert ends == [(row["member"], row["state"]) for row in rows]
        assert status.detail.stragglers == ()
        types = [one.type for one in status.detail.conditions]
        assert types == (["Suspended"] if state == "Suspended" else [])
        because = explain(status, [], flags="", cluster=True).because
        assert not [text for text in because if "Resizing" in text or "slow" in text]


@pytest.mark.parametrize(("state", "end"), [("Complete", "finished"), ("Failed", "dead")])
def test_rank_outcomes_come_from_pods_if_the_status_rows_are_stale(state: str, end: str) -> None:
    """An operator of an earlier release leaves the last states of the ranks in the status."""
    rows = [{"member": "0.0#1000", "state": "active"}, {"member": "2.0#1000", "state": "active"}]
    body = job(state, spec={"procsPerReplica": 1}, ranks=rows)
    leaving = pod(1, 1, metadata={"deletionTimestamp": CREATED})
    status = job_status(body, [pod(0, 1, "Succeeded"), leaving], NOW_S)
    assert status.detail is not None
    assert [str(rank.state) for rank in status.detail.ranks] == ["finished", end, end]
