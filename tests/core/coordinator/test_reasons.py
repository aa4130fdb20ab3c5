"""Reasons of the condition Degraded that the coordinator finds in what its ranks do."""

from __future__ import annotations

from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.coordinator.report import status
from paceline_api.reasons import Reason
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from tests.core.coordinator.test_coordinator import SETTLE_MS, A, B, Desk, register


def degraded(desk: Desk) -> dict[str, str]:
    """Return the messages of the condition Degraded, by reason."""
    return {c.reason: c.message for c in status(desk.state).conditions if c.type == "Degraded"}


def test_fewer_active_ranks_than_the_quorum_are_reported() -> None:
    desk = Desk()
    desk.pods(0, 1)
    desk.form(A, B)
    assert degraded(desk) == {}
    asked = RoundSettings(mode=Mode.QUORUM, quorum=3)
    desk.post(coord.SetTargets(m.Targets(settings=asked)))
    assert degraded(desk)[Reason.QUORUM_REDUCED] == "quorum 3 is asked for, 2 ranks are active"


def test_a_start_below_min_replicas_waits_and_says_for_what() -> None:
    desk = Desk(replicas=4, min_replicas=3)
    desk.pods(0, 1)
    for who in (A, B):
        desk.agent(who)
        desk.say(register(who))
    desk.post(coord.Tick(), SETTLE_MS)
    assert "(minReplicas)" in degraded(desk)[Reason.WAITING_FOR_EVIDENCE]


def outcome(desk: Desk) -> tuple[str, str]:
    assert desk.state.outcome is not None
    return desk.state.outcome.reason, desk.state.outcome.message


def test_a_defect_of_the_runtime_ends_the_job_with_its_reason() -> None:
    desk = Desk()
    desk.pods(0, 1)
    desk.form(A, B)
    desk.say(m.Fatal(A, "RuntimeBroken", "KeyError(7)"))
    reason, message = outcome(desk)
    assert reason == Reason.RUNTIME_BROKEN
    assert "KeyError(7)" in message


def test_a_job_whose_ranks_are_all_drained_is_interrupted() -> None:
    desk = Desk()
    desk.pods(0, 1)
    at = desk.form(A, B)
    for who in (A, B):
        desk.say(m.Leaving(at, who, False))
    assert outcome(desk) == (Reason.INTERRUPTED, "all ranks were drained at version 0")
