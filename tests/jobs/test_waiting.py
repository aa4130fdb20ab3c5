"""Conditions under which `paceline wait` returns."""

from __future__ import annotations

import pytest
from paceline.jobs.core import from_run
from paceline.jobs.core.explain import explain
from paceline.jobs.interface import TRAINING, JobEvent, Until
from paceline_api.ids import MemberId
from paceline_api.reasons import ConditionType
from paceline_api.status import (
    LiveCondition,
    Outcome,
    RankPhase,
    RankStatus,
    Status,
    StragglerStatus,
)


@pytest.mark.parametrize(("wanted", "all_take_part"), [(2, True), (3, False), (1, False)])
def test_a_job_just_scaled_is_not_yet_training_with_all_replicas(
    wanted: int, all_take_part: bool
) -> None:
    """The run knows the new size at once, but its coordinator learns of it a moment later.

    Until then the coordinator reports two replicas.
    """
    ranks = tuple(RankStatus(MemberId(slot, 0, 0), RankPhase.ACTIVE) for slot in range(2))
    ring = LiveCondition(ConditionType.RING_READY, "", "", 0.0)
    status = Status("first", "uid", replicas=2, ranks=ranks, conditions=(ring,))
    job = from_run.running(
        *("first", "runs/first-1", status),
        replicas=wanted,
        suspended="",
        rounds_per_s_now=0.0,
        left_s=None,
        age_s=0.0,
    )
    assert (job.state, job.ready, job.replicas) == (TRAINING, 2, wanted)
    assert job.meets(Until.TRAINING) == all_take_part


@pytest.mark.parametrize("suspended", [False, True])
def test_an_ended_or_suspended_job_shows_rank_outcomes_and_no_stale_conditions(
    suspended: bool,
) -> None:
    ranks = (
        RankStatus(MemberId(0, 0, 0), RankPhase.DEAD, why="it has ended", finished=True),
        RankStatus(MemberId(1, 0, 0), RankPhase.DEAD, why="signal 9 (SIGKILL)"),
    )
    resizing = LiveCondition(ConditionType.RESIZING, "ReplicasDiffer", "1 replicas run, 2 are", 0.0)
    slow = StragglerStatus(MemberId(0, 0, 0), 300, 0.0, "Tolerate")
    outcome = None if suspended else Outcome(True, "Complete", "9 rounds")
    job = from_run.running(
        *("first", "runs/first-1"),
        Status(
            "first", "u", ranks=ranks, conditions=(resizing,), stragglers=(slow,), outcome=outcome
        ),
        replicas=2,
        suspended="Suspended" if suspended else "",
        rounds_per_s_now=0.0,
        left_s=None,
        age_s=0.0,
    )
    assert job.detail is not None
    assert [rank.state for rank in job.detail.ranks] == [RankPhase.FINISHED, RankPhase.DEAD]
    assert (job.detail.conditions, job.detail.stragglers) == ((), ())
    warned = [JobEvent(1.0, True, "RankSlow", "old"), JobEvent(2.0, True, "RankDied", "rank 1")]
    assert explain(job, warned, flags="", cluster=False).because == ("RankDied: rank 1",)
