"""GO by way of relays: nothing is lost with one, whatever the size of the job (docs/protocol.md).

The histories of test_simulation.py draw small jobs with and without relays; here are the moments
that matter, and jobs that are large enough for relays by themselves.
"""

from __future__ import annotations

import pytest
from paceline.core import messages as m
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.records import Go
from paceline.core.protocol.tree import TREE_ABOVE
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode
from sim.faults import Fault, Kind
from sim.histories import run
from sim.simulation import Simulation
from sim.world import MS, World

SETTINGS = RoundSettings(mode=Mode.QUORUM, quorum=4, bench_after_ns=300 * MS)
ROUND = 5


def gos(sim: Simulation) -> dict[int, Go]:
    history = sim.checkers.history(sim.finished[0].state.log.digest)
    return {r.round: r for r in history if isinstance(r, Go)}


def harm_a_relay(sim: Simulation, how: Kind) -> list[tuple[MemberId, int]]:
    """The first relay of a round, once GO is on its way to it: whom, and how many wait for it."""
    to_peer, harmed = sim.links.to_peer, list[tuple[MemberId, int]]()

    def watch(source: MemberId, to: MemberId, message: m.PeerMessage) -> None:
        to_peer(source, to, message)
        relay = isinstance(message, m.Start) and message.go.round == ROUND and message.onward
        if relay and not harmed:
            harmed.append((to, len(relay)))
            if how is Kind.KILL:
                sim.after(0, lambda: sim.kill(to, restart=True))
            else:
                sim.ranks[to].stopped = True

    sim.links.to_peer = watch  # type: ignore[method-assign]
    return harmed


@pytest.mark.parametrize("how", [Kind.KILL, Kind.FREEZE])
@pytest.mark.parametrize("seed", range(5))
def test_a_relay_that_never_passes_it_on_costs_a_generation_and_no_gradient(
    how: Kind, seed: int
) -> None:
    """Killed: its agent tells. Frozen for ever: silence, the agent kills it, which is evidence."""
    world = World(replicas=7, settings=SETTINGS, leases=90, tree_above=3)
    sim = Simulation(world, seed)
    sim.start()
    harmed = harm_a_relay(sim, how)
    sim.run()
    sim.checkers.at_end()
    [(relay, behind)] = harmed
    assert behind >= 1
    assert sim.ranks[relay].exit is None, "it never came back"
    found = gos(sim)
    assert found[ROUND].generation > found[ROUND - 1].generation, "the round began anew"
    assert sim.finished[0].state.log.ledger.total().applied == world.plan.samples


def test_jobs_above_the_threshold_use_relays_and_survive_deaths() -> None:
    ranks = TREE_ABOVE + 8
    settings = RoundSettings(mode=Mode.QUORUM, quorum_percent=75, bench_after_ns=300 * MS)
    world = World(replicas=ranks, settings=settings, leases=3 * ranks)
    what = [Fault(130, Kind.KILL, 100, 7), Fault(150, Kind.FREEZE, 10**6, 30)]
    sim = run(world, 3, what)
    assert len(sim.finished) >= ranks - 1
    assert sim.finished[0].state.log.ledger.total().applied == world.plan.samples
