"""Rows measured from the samples of a run, without its warm-up and waiting times."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from paceline.core.forecast.link import MeasuredSum
from paceline.core.forecast.measured import earlier, reported_noise_scale, row
from paceline.core.forecast.model import Setting
from paceline.core.status import Fact
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.status import MembershipChange, RankPhase, RankStatus, Status
from paceline_api.types.enums import Mode

from testing.forecast_samples import pods, rank


def change(number: int, members: int, version: int, at_s: float) -> MembershipChange:
    return MembershipChange(
        generation=GenerationId(1, "c", number),
        reason="Joined",
        why="",
        members=members,
        version=version,
        wall_s=at_s,
        agree_s=0.5,
        start_s=1.0,
    )


FULL = RoundSettings(mode=Mode.FULL)


def test_a_row_is_built_from_the_samples_of_two_ranks() -> None:
    measured = row(pods(rank(0, 40, 10), rank(1, 60, 10)), FULL, 1)
    assert measured is not None
    assert measured.setting == Setting(2, 2, 32)
    assert [set(each) for each in measured.computing_s] == [{0.04}, {0.06}]
    assert measured.sums == (MeasuredSum(2, 4096, 0.01),)
    assert measured.payload_bytes == 4096
    assert measured.step_s == pytest.approx(0.1)
    assert measured.update_s >= 0.005
    assert not measured.streamed
    assert measured.noise_scale is None


def test_the_row_of_a_quorum_job_records_the_quorum() -> None:
    settings = RoundSettings(mode=Mode.QUORUM, quorum=1)
    measured = row(pods(rank(0, 40, 10), rank(1, 60, 10)), settings, 1)
    assert measured is not None
    assert measured.setting == Setting(2, 1, 32)


def test_a_rank_without_data_is_ignored_for_the_batch_size() -> None:
    idle = rank(1, 60, 10)
    idle = replace(idle, steps=tuple(replace(step, samples=0) for step in idle.steps))
    measured = row(pods(rank(0, 40, 10), idle), FULL, 1)
    assert measured is not None
    assert measured.setting == Setting(2, 2, 32)
    assert row(pods(idle), FULL, 1) is None


def test_a_rank_that_has_left_is_not_counted() -> None:
    left = rank(1, 60, 10)
    measured = row(pods(rank(0, 40, 64, since=40), left), FULL, 1)
    assert measured is not None
    assert measured.setting.members == 1
    assert measured.sums == ()


def test_steps_of_an_earlier_membership_are_excluded() -> None:
    old, new = rank(0, 40, 64), rank(1, 60, 10, since=54)
    measured = row(pods(old, new), FULL, 1)
    assert measured is not None
    assert [len(each) for each in measured.computing_s] == [7, 7], "steps since round 56 began"


@pytest.mark.parametrize("rounds", [1, 5])
def test_too_few_rounds_give_no_row(rounds: int) -> None:
    assert row(pods(rank(0, 40, rounds), rank(1, 60, rounds)), FULL, 1) is None
    assert row([], FULL, 1) is None


def test_the_noise_scale_is_derived_from_the_reported_norms() -> None:
    """The facts follow |G|² = 2 and tr(cov) = 2 x 100.

    A batch of B then has the squared norm 2 x (1 + 100/B).
    """
    facts: dict[str, float] = {
        Fact.OWN_BATCH: 32.0,
        Fact.OWN_SQUARE: 2 * (1 + 100 / 32),
        Fact.MEAN_BATCH: 64.0,
        Fact.MEAN_SQUARE: 2 * (1 + 100 / 64),
    }
    members = [MemberId(slot, 0, 0) for slot in (0, 1)]
    ranks = [
        RankStatus(
            member, RankPhase.ACTIVE, facts={str(name): value for name, value in facts.items()}
        )
        for member in members
    ]
    assert reported_noise_scale(ranks) == pytest.approx(100)
    assert reported_noise_scale([RankStatus(members[0], RankPhase.ACTIVE)]) is None


def test_earlier_memberships_with_enough_rounds_are_listed() -> None:
    changes = (
        change(1, 2, 0, 100.0),
        change(2, 3, 40, 110.5),
        change(3, 4, 44, 120.0),
        change(4, 3, 100, 130.0),
    )
    status = Status(job="job", coordinator="c", settings=msgspec.to_builtins(FULL), changes=changes)
    rows = list(earlier(status, 32, 1))
    assert [one.generation for one in rows] == ["1.1", "1.3"], "1.2 made four rounds"
    assert rows[0].setting == Setting(2, 2, 32)
    assert rows[0].step_s == pytest.approx((110.5 + 0.5 - 101.0) / 40)
    assert rows[1].setting == Setting(4, 4, 32)
