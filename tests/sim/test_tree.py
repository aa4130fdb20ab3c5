"""Announcements and GO travel through heads (R41), states through joiners (R45).

Nothing is lost when one of them fails, at any size. The histories of test_simulation.py draw small
jobs with and without heads. This module covers the critical moments, jobs that are large enough to
use heads, and what fails if a head does not do its part.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from paceline.core import messages as m
from paceline.core.protocol.records import Go
from paceline.core.protocol.tree import TREE_ABOVE
from paceline.core.rank import membership
from paceline.core.rank.gather import Collector
from paceline_api.ids import MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.simulation.faults import Fault, Kind
from testing.simulation.heads import ROUND, harm_a_head, harm_who_collects
from testing.simulation.histories import run
from testing.simulation.simulation import BrokenPromiseError, Simulation
from testing.simulation.world import MS, World

SETTINGS = RoundSettings(mode=Mode.QUORUM, quorum=4, bench_after_ns=300 * MS)


def gos(sim: Simulation) -> dict[int, Go]:
    history = sim.checkers.history(sim.finished[0].state.log.digest)
    return {r.round: r for r in history if isinstance(r, Go)}


@pytest.mark.parametrize("how", [Kind.KILL, Kind.FREEZE])
@pytest.mark.parametrize("seed", range(5))
def test_losing_a_head_that_holds_a_go_costs_a_generation_but_no_gradient(
    how: Kind, seed: int
) -> None:
    """If the head is killed, its agent reports the death.

    If it freezes forever, it is silent until its agent kills it, and that is the evidence.
    """
    world = World(replicas=7, settings=SETTINGS, leases=90, tree_above=0)
    sim = Simulation(world, seed)
    sim.start()
    harmed = harm_a_head(sim, how)
    sim.run()
    sim.checkers.at_end()
    [(head, behind)] = harmed
    assert behind >= 1
    assert sim.ranks[head].exit is None, "it never came back"
    by_round = gos(sim)
    assert by_round[ROUND].generation > by_round[ROUND - 1].generation, "the round began anew"
    assert sim.finished[0].state.log.ledger.total().applied == world.plan.samples


@pytest.mark.long
def test_jobs_above_the_threshold_use_heads_and_survive_deaths() -> None:
    ranks = TREE_ABOVE + 8
    settings = RoundSettings(mode=Mode.QUORUM, quorum_percent=75, bench_after_ns=300 * MS)
    world = World(replicas=ranks, settings=settings, leases=3 * ranks)
    what = [Fault(130, Kind.KILL, 100, 7), Fault(150, Kind.FREEZE, 10**6, 30)]
    sim = run(world, 3, what)
    assert len(sim.finished) >= ranks - 1
    assert sim.finished[0].state.log.ledger.total().applied == world.plan.samples


# ---- announcements -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Kind.KILL, Kind.FREEZE])
@pytest.mark.parametrize("seed", range(5))
def test_losing_a_head_that_holds_announcements_costs_a_generation_but_no_gradient(
    how: Kind, seed: int
) -> None:
    world = World(replicas=7, settings=FULL, leases=70, tree_above=0)
    sim = Simulation(world, seed)
    sim.start()
    harmed = harm_who_collects(sim, how)
    sim.run()
    sim.checkers.at_end()
    assert harmed
    by_round = gos(sim)
    assert by_round[ROUND].generation > by_round[ROUND - 1].generation, "the round began anew"
    assert sim.finished[0].state.log.ledger.total().applied == world.plan.samples


FULL = RoundSettings(mode=Mode.FULL, bench_after_ns=10**12)
SMALL = World(replicas=7, settings=FULL, leases=70, tree_above=0)


def only_by_time(self: Collector) -> int | None:
    """Return when the head sends by time alone, without checking if its group is complete."""
    return self._since_ns + self._patience_ns if self._held else None


@pytest.mark.long
def test_a_job_stalls_if_heads_do_not_forward_a_complete_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(SMALL, 1, []).finished
    monkeypatch.setattr(Collector, "due_ns", only_by_time)
    with pytest.raises(BrokenPromiseError, match="I8: not over"):
        run(SMALL, 1, [])


@pytest.mark.long
def test_a_head_mostly_sends_its_group_in_one_message() -> None:
    """Every rank is needed; slow ranks may add messages in between."""
    ranks = TREE_ABOVE + 17
    world = World(replicas=ranks, settings=FULL, leases=3 * ranks)
    sim = Simulation(world, 2)
    sim.start()
    to_peer, sent = sim.links.to_peer, Counter[tuple[int, int]]()

    def watch(source: MemberId, to: MemberId, message: m.PeerMessage) -> None:
        to_peer(source, to, message)
        if isinstance(message, m.Gathered):
            sent[message.round, message.group] += 1

    setattr(sim.links, "to_peer", watch)  # noqa: B010
    sim.run()
    assert sent
    assert sorted(sent.values())[len(sent) // 2] == 1


def start_of_seven() -> Simulation:
    world = World(replicas=7, settings=FULL, leases=21, until_ms=5000)
    sim = Simulation(world, 4)
    sim.start()
    return sim


def test_no_rank_sends_the_first_state_more_than_twice() -> None:
    """A rank that has received the state passes it on (R45)."""
    sim = start_of_seven()
    send_state, senders = sim.links.send_state, Counter[MemberId]()

    def watch(src: MemberId, dst: MemberId, *what: Any) -> None:
        senders[src] += 1
        send_state(src, dst, *what)

    setattr(sim.links, "send_state", watch)  # noqa: B010
    sim.run()
    sim.checkers.at_end()
    assert sum(senders.values()) == 6
    assert max(senders.values()) == 2


def test_without_r45_later_joiners_never_receive_a_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "pass_on", lambda *_: None)
    with pytest.raises(BrokenPromiseError, match="I8: not over"):
        start_of_seven().run()
