"""A peer message that names non-members is rejected, and the rank continues."""

from __future__ import annotations

import pytest
from paceline.core import messages as m
from paceline.core.protocol.composition import compact
from paceline.core.protocol.records import AnnounceKind
from paceline.core.rank import events as ev
from paceline_api.ids import MemberId

from benchmarks.protocol import Player
from testing.makers import go

RANKS = 4
STRANGER = MemberId(77, 0, 0)


def messages(player: Player, named: MemberId) -> dict[str, m.PeerMessage]:
    """Return each kind of message that asks a rank to send something to `named`."""
    state = player.state
    others = [member for member in state.log.active if member != state.me]
    words = dict.fromkeys(others, (AnnounceKind.ARRIVE, 0))
    return {
        "ask-state": m.AskState(state.gen_id, named, at_least=0),
        "state": m.StateTransfer(state.gen_id, state.log.snapshot(), (named,)),
        "start": m.Start(compact(state.log, go(state.log), words), (named,)),
    }


def sent_to(effects: list[ev.Effect], member: MemberId) -> bool:
    return any(
        (isinstance(effect, ev.SendState | ev.PassState) and effect.to == member)
        or (isinstance(effect, ev.ToPeer) and effect.member == member)
        for effect in effects
    )


@pytest.mark.parametrize("kind", ["ask-state", "state", "start"])
def test_a_message_that_names_a_non_member_is_rejected_and_sends_nothing(kind: str) -> None:
    player = Player(RANKS)
    version = player.state.log.version
    effects = player.machine.handle(0, messages(player, STRANGER)[kind])
    assert [type(effect) for effect in effects].count(ev.RefusePeer) == 1
    assert not sent_to(effects, STRANGER)
    assert player.state.serve == {}
    assert player.state.log.version == version


@pytest.mark.parametrize("kind", ["ask-state", "state", "start"])
def test_a_message_that_names_a_member_is_carried_out(kind: str) -> None:
    player = Player(RANKS)
    named = player.state.log.members[-1]
    effects = player.machine.handle(0, messages(player, named)[kind])
    assert sent_to(effects, named)
    assert not any(isinstance(effect, ev.RefusePeer) for effect in effects)


def test_a_flood_of_non_members_leaves_no_state_behind() -> None:
    player = Player(RANKS)
    for slot in range(1000):
        asked = m.AskState(player.state.gen_id, MemberId(100 + slot, 0, 0), at_least=10**6)
        player.machine.handle(0, asked)
    assert player.state.serve == {}
