"""A rank that returns its leases, and wants leases again in the same round (R11, R14)."""

from __future__ import annotations

from paceline.core import messages as m
from paceline.core.protocol.records import AnnounceKind
from paceline.core.rank import events as ev
from paceline.core.rank.state import Main

from benchmarks.protocol import Player


def test_returned_leases_are_not_taken_back_before_the_round_ends() -> None:
    """A gradient of a lease taken back could not be part of this round.

    The rank has announced that it has nothing. If no other rank had anything either, the round
    would never start.
    """
    player = Player(3)
    starter, rest = player.state.log.active[0], player.state.log.active[1]
    assert player.state.starter == starter
    player.state.me, player.state.main = rest, Main.RUN
    held = player.state.log.held(rest)
    assert held
    announced: list[m.Announce] = []
    for event in (ev.Rest(), ev.Unrest(), ev.Want()):
        effects = player.machine.handle(0, event)
        sent = [e.message for e in effects if isinstance(e, ev.ToPeer)]
        announced += [x for x in sent if isinstance(x, m.Announce)]
    assert [x.kind for x in announced] == [AnnounceKind.IDLE] * 2
    assert [x.share.returned for x in announced] == [held] * 2
    assert [x.share.resting for x in announced] == [True, False]
    assert player.state.main is Main.WANT, "it waits for the leases of the next round"
