"""A joiner installs the donor's state between two reductions, whenever it arrives (R15)."""

from __future__ import annotations

from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core.protocol.composition import compact
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind
from paceline.core.rank import events as ev
from paceline.core.rank.state import QUEUE_MAX
from paceline_api.types.enums import Pacing

from benchmarks.protocol import Player
from testing.makers import go

RANKS, MS = 4, 10**6


def a_joiner() -> tuple[Player, m.StateTransfer]:
    """Return a player without state in a group that has it, and the donor's message to it."""
    player = Player(RANKS)
    state = player.state
    donor = m.StateTransfer(state.gen_id, state.log.snapshot(), ())
    state.passive, state.has_state = True, False
    return player, donor


def kinds(effects: list[ev.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def round_of(log: Log) -> m.Start:
    words = dict.fromkeys(log.active, (AnnounceKind.ARRIVE, 0))
    return m.Start(compact(log, go(log), words))


def test_a_state_that_arrives_between_rounds_is_installed_at_once() -> None:
    player, donor = a_joiner()
    assert "InstallState" in kinds(player.machine.handle(0, donor))
    assert not player.state.passive


def test_a_state_that_arrives_in_a_reduction_is_installed_after_it() -> None:
    """Queued sums are applied in the buffer that the reduction contributes from.

    Without the rule, a streamed reduction would add that buffer's content on all ranks.
    """
    player, donor = a_joiner()
    assert "Reduce" in kinds(player.machine.handle(0, round_of(player.state.log)))
    assert "InstallState" not in kinds(player.machine.handle(MS, donor))
    assert player.state.passive
    names = kinds(player.machine.handle(2 * MS, ev.Reduced()))
    assert names.index("Queue") < names.index("InstallState")
    assert not player.state.passive
    assert player.state.log.version == 1


def test_a_joiner_with_a_full_queue_asks_for_a_newer_state() -> None:
    """A joiner keeps the sums of up to QUEUE_MAX rounds.

    Beyond that it drops them instead of holding up the group.
    """
    player, donor = a_joiner()
    state, machine = player.state, player.machine
    assert state.commit is not None
    state.commit = replace(state.commit, donor=state.log.members[-1])

    def through_a_round() -> list[ev.Effect]:
        begun = machine.handle(MS, m.Start(replace(go(state.log), round=state.round)))
        assert "Reduce" in kinds(begun)
        return machine.handle(MS, ev.Reduced())

    for _ in range(QUEUE_MAX):
        assert "DropQueue" not in kinds(through_a_round())
    assert len(state.queue) == QUEUE_MAX
    effects = through_a_round()
    assert "DropQueue" in kinds(effects)
    asked = [e.message for e in effects if isinstance(e, ev.ToPeer)]
    assert [type(message).__name__ for message in asked] == ["AskState"]
    assert isinstance(asked[0], m.AskState)
    assert (asked[0].member, asked[0].at_least) == (state.me, state.round)
    assert not state.queue
    machine.handle(MS, donor)
    assert state.passive, "a state that is older than what was dropped is of no use"


def test_a_joiner_with_other_data_than_the_job_fails_it() -> None:
    player, donor = a_joiner()
    other = replace(player.state.log.plan, seed=player.state.log.plan.seed + 1)
    player.state.begun = ev.Begin("model", other, 1, Pacing.ROUND)
    effects = player.machine.handle(0, donor)
    fatal = [e.message for e in effects if isinstance(e, ev.ToCoordinator)]
    assert [type(error) for error in fatal] == [m.Fatal]
    (error,) = fatal
    assert isinstance(error, m.Fatal)
    assert error.reason == "PlanDiffers"
    assert "seed: " in error.message
