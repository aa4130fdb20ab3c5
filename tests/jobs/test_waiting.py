"""When what `wait` waits for is there."""

from __future__ import annotations

import pytest
from paceline.core.protocol.ids import MemberId
from paceline.core.status import Condition, RankPhase, RankStatus, Status
from paceline.jobs.core import from_run
from paceline.jobs.core.waiting import reached
from paceline.jobs.interface import TRAINING, Until
from paceline_api.reasons import ConditionType


@pytest.mark.parametrize(("wanted", "all_take_part"), [(2, True), (3, False), (1, False)])
def test_a_job_that_was_just_scaled_does_not_train_with_all_that_are_wanted(
    wanted: int, all_take_part: bool
) -> None:
    """The run knows at once; its coordinator, which tells of two, hears of it a moment later."""
    ranks = tuple(RankStatus(MemberId(slot, 0, 0), RankPhase.ACTIVE) for slot in range(2))
    ring = Condition(ConditionType.RING_READY, "", "", 0.0)
    status = Status("first", "uid", replicas=2, ranks=ranks, conditions=(ring,))
    told = from_run.running(
        *("first", "runs/first-1", status),
        replicas=wanted,
        suspended="",
        rounds_per_s_now=0.0,
        left_s=None,
        age_s=0.0,
    )
    assert (told.state, told.ready, told.replicas) == (TRAINING, 2, wanted)
    assert reached(told, Until.TRAINING) == all_take_part
