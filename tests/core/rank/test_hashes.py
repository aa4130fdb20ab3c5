"""Ranks compare hashes of their committed weights at intervals; a difference ends the job (R23)."""

from __future__ import annotations

import pytest
from paceline.core.messages import Fatal, Start, WeightsHash
from paceline.core.protocol.records import DataPlan
from paceline.core.rank import events as ev
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.makers import fresh, go, member
from tests.core.rank.test_script import lone, second_of_two, step, take

PLAN = DataPlan(samples=400, batch=4, epochs=1, seed=1)


@pytest.mark.parametrize(("every", "due"), [(2, [2, 4, 6]), (3, [3, 6]), (0, [])])
def test_weights_are_hashed_at_the_configured_interval(every: int, due: list[int]) -> None:
    rank, hashed = lone(PLAN, RoundSettings(hash_every=every)), []
    for _ in range(6):
        step(rank)
        effects = take(rank, ev.Reduced())
        hashed += [rank.state.log.version for e in effects if isinstance(e, ev.Apply) and e.hash]
    assert hashed == due


def test_a_rank_sends_its_hash_to_the_rank_that_compares() -> None:
    rank = second_of_two(PLAN, RoundSettings(mode=Mode.SOLO, hash_every=1))
    log = rank.state.log
    take(rank, Start(go(log, fresh(log, 0))), ev.Reduced())
    sent = [e for e in take(rank, ev.Hashed(1, 0xABC)) if isinstance(e, ev.ToPeer)]
    assert [(e.member, e.message) for e in sent] == [
        (member(0), WeightsHash(log.id, member(1), 1, 0xABC))
    ]


def test_different_hashes_of_one_version_fail_the_job_and_are_reported() -> None:
    rank = second_of_two(PLAN)

    def faults(version: int, slot: int, value: int) -> list[str]:
        note = WeightsHash(rank.state.log.id, member(slot), version, value)
        messages = [e.message for e in take(rank, note) if isinstance(e, ev.ToCoordinator)]
        fatal = [message for message in messages if isinstance(message, Fatal)]
        assert [message.reason for message in fatal] == ["WeightsDiffer"] * len(fatal)
        return [message.message for message in fatal]

    assert faults(100, 0, 0xABC) == []
    assert faults(100, 1, 0xABC) == []
    assert faults(200, 1, 0x111) == [], "another version has another hash"
    [why] = faults(200, 0, 0x222)
    assert why == (
        f"weights of version 200 differ: rank {member(1)} has 0x00000111, "
        f"rank {member(0)} has 0x00000222"
    )
