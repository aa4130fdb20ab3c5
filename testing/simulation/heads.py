"""Injected deaths and freezes of group heads at the moment when other ranks rely on them (R41)."""

from __future__ import annotations

from paceline.core import messages as m
from paceline_api.ids import MemberId

from testing.simulation.faults import Kind
from testing.simulation.simulation import Simulation

ROUND = 5


def harm(sim: Simulation, whom: MemberId, how: Kind) -> None:
    """Kill a rank or stop it for good."""
    if how is Kind.KILL:
        sim.after(0, lambda: sim.kill(whom, restart=True))
    else:
        sim.ranks[whom].stopped = True


def harm_a_head(sim: Simulation, how: Kind, round_: int = ROUND) -> list[tuple[MemberId, int]]:
    """Harm the first head of a round once GO is on its way to it.

    Args:
        sim: the simulation, before the round.
        how: KILL kills the head; any other kind stops it.
        round_: the round to wait for.

    Returns:
        a list that will hold the head and the number of ranks that wait for it.
    """
    to_peer, harmed = sim.links.to_peer, list[tuple[MemberId, int]]()

    def watch(source: MemberId, to: MemberId, message: m.PeerMessage) -> None:
        to_peer(source, to, message)
        if not isinstance(message, m.Start) or not message.onward or harmed:
            return
        if message.go.round == round_:
            harmed.append((to, len(message.onward)))
            harm(sim, to, how)

    setattr(sim.links, "to_peer", watch)  # noqa: B010
    return harmed


def harm_who_collects(sim: Simulation, how: Kind, round_: int = ROUND) -> list[MemberId]:
    """Harm the first head of a round to which an announcement was sent.

    The head has then not yet passed the announcement on.

    Args:
        sim: the simulation, before the round.
        how: KILL kills the head; any other kind stops it.
        round_: the round to wait for.

    Returns:
        a list that will hold the head.
    """
    to_peer, harmed = sim.links.to_peer, list[MemberId]()

    def watch(source: MemberId, to: MemberId, message: m.PeerMessage) -> None:
        to_peer(source, to, message)
        if isinstance(message, m.Announce) and message.round == round_ and not harmed:
            harmed.append(to)
            harm(sim, to, how)

    setattr(sim.links, "to_peer", watch)  # noqa: B010
    return harmed
