"""One connection per pod (R43): agents that are stopped, die or reconnect.

The tests also show what happens without the protections of the rule.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core.agent.relay import Relay
from paceline.core.coordinator import silence
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.simulation.faults import Fault, Kind, plant
from testing.simulation.simulation import Simulation
from testing.simulation.world import MS, World

FOR_EVER_MS = 10**7
SETTINGS = RoundSettings(mode=Mode.QUORUM, quorum=3, bench_after_ns=300 * MS)


def pods(*what: Fault, leases: int = 60, seed: int = 1) -> Simulation:
    """Start a simulation of three pods with two ranks each."""
    world = World(replicas=3, procs=2, settings=SETTINGS, leases=leases, until_ms=10_000)
    sim = Simulation(world, seed)
    sim.start()
    plant(sim, list(what))
    return sim


def run(sim: Simulation) -> Simulation:
    sim.run()
    sim.checkers.at_end()
    return sim


def happened(sim: Simulation, reason: str) -> int:
    return sum(c.reasons.count(reason) for c in sim.all_coordinators)


def all_agents_stop(seed: int = 1) -> Simulation:
    """Stop all agents for longer than `freezeTimeout`, so that no healthy rank is heard."""
    sim = pods(seed=seed, leases=90)

    def stop() -> None:
        for pod in sim.pods.values():
            pod.frozen = True

    def go_on() -> None:
        for pod in sim.pods.values():
            pod.thaw()

    sim.after(200, stop)
    sim.after(200 + 2 * sim.world.freeze_ms, go_on)
    return sim


@pytest.mark.long
def test_agents_that_were_stopped_kill_no_rank_when_they_continue() -> None:
    for seed in range(5):
        sim = run(all_agents_stop(seed))
        assert happened(sim, "RankSilent") >= 6
        assert len(sim.finished) == 6, "all who began"
        assert not happened(sim, "RankDied")


def test_without_r43_agents_that_were_stopped_kill_the_whole_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "is_awake", lambda *_: True)
    monkeypatch.setattr(silence, "_kill_due_ns", lambda *_: 0)
    sim = all_agents_stop()
    sim.run()
    assert happened(sim, "RankDied") >= 6


def one_rank_stops() -> Simulation:
    """Freeze one rank forever, in a pod whose agent and other rank are healthy."""
    return pods(Fault(200, Kind.FREEZE, FOR_EVER_MS, 2))


def test_heartbeats_of_an_agent_do_not_hide_a_frozen_rank() -> None:
    sim = run(one_rank_stops())
    assert happened(sim, "RankSilent") == 1
    assert not happened(sim, "RoundStuck"), "it was found before the round that waits for it"
    assert len(sim.finished) == 6, "the frozen one was killed, and one started in its place"


def test_without_the_list_of_live_ranks_only_a_stuck_round_reveals_a_frozen_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Relay.beat

    def all_are_well(relay: Relay, *given: Any) -> m.PodBeat:
        alive = tuple((member.local, member.attempt) for member in relay.lines)
        return replace(real(relay, *given), heard=alive)

    monkeypatch.setattr(Relay, "beat", all_are_well)
    assert happened(run(one_rank_stops()), "RoundStuck")


@pytest.mark.long
def test_a_pod_whose_agent_dies_is_replaced_as_a_whole() -> None:
    for seed in range(5):
        sim = run(pods(Fault(200, Kind.ORPHAN, 50, 2), seed=seed))
        assert len(sim.finished) == 6
        assert sim.now < 3000 * MS


@pytest.mark.long
def test_a_reconnect_of_an_agent_causes_no_membership_change() -> None:
    """The greeting lists all ranks.

    No message that the previous connection lost is missed.
    """
    for seed in range(5):
        faults = [Fault(at, Kind.RECONNECT, 0, seed) for at in (160, 190, 230, 280)]
        sim = run(pods(*faults, seed=seed))
        assert len(sim.finished) == 6
        assert happened(sim, "GenerationFormed") == 1


def test_a_commit_is_sent_once_per_pod() -> None:
    sim = pods()
    sent: list[tuple[str, tuple[int, int], int]] = []
    way_down = sim.links.to_ranks

    def watch(name: str, order: Any) -> None:
        if isinstance(order.message, m.Commit):
            sent.append((name, order.pod, len(order.members)))
        way_down(name, order)

    setattr(sim.links, "to_ranks", watch)  # noqa: B010
    run(sim)
    assert sent == [("a", (slot, 0), 2) for slot in range(3)]
