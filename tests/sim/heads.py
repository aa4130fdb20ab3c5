"""Heads of groups that die or freeze at the moment when others rely on them (R41)."""

from __future__ import annotations

from paceline.core import messages as m
from paceline.core.protocol.ids import MemberId
from sim.faults import Kind
from sim.simulation import Simulation

ROUND = 5


def harm(sim: Simulation, whom: MemberId, how: Kind) -> None:
    if how is Kind.KILL:
        sim.after(0, lambda: sim.kill(whom, restart=True))
    else:
        sim.ranks[whom].stopped = True


def harm_a_head(sim: Simulation, how: Kind, round_: int = ROUND) -> list[tuple[MemberId, int]]:
    """The first head of a round, once GO is on its way to it: whom, and how many wait for it."""
    to_peer, harmed = sim.links.to_peer, list[tuple[MemberId, int]]()

    def watch(source: MemberId, to: MemberId, message: m.PeerMessage) -> None:
        to_peer(source, to, message)
        onward = message.onward if isinstance(message, m.Start) else ()
        if onward and message.go.round == round_ and not harmed:
            harmed.append((to, len(onward)))
            harm(sim, to, how)

    sim.links.to_peer = watch
    return harmed


def harm_who_collects(sim: Simulation, how: Kind, round_: int = ROUND) -> list[MemberId]:
    """The first head of a round that has heard one of its group and passed nothing on."""
    to_peer, harmed = sim.links.to_peer, list[MemberId]()

    def watch(source: MemberId, to: MemberId, message: m.PeerMessage) -> None:
        to_peer(source, to, message)
        if isinstance(message, m.Announce) and message.round == round_ and not harmed:
            harmed.append(to)
            harm(sim, to, how)

    sim.links.to_peer = watch
    return harmed
