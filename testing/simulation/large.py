"""Measure on the virtual clock how long jobs of hundreds of ranks take to start and to change.

    python -m testing.simulation.large [--ranks 256 1024]

Simulated is the protocol: hops of 0.2 ms, its timers, the time until processes are reaped and
restarted, and the states of joiners on links that are shared by everything that leaves a rank at
the same time. The state machines themselves take no time; `benchmarks.protocol` and the rehearsal
measure that.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from typing import NamedTuple

from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.records import Go
from paceline.core.protocol.tree import BRANCHES
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.simulation.ranks import SimRank
from testing.simulation.simulation import Simulation
from testing.simulation.sums import Sum
from testing.simulation.world import MS, World

PROCS = 8
HOP_MS = 0.2
STATE_MS = 8 * 1000 / 25
"""Time to send 1 GB over 25 Gbit/s."""
LOOKED_AT = 16
"""Ranks whose states are computed and checked. The others get the cheap checks only."""


def large(ranks: int, *, leases_each: int, state_ms: float = 0.0, seed: int = 1) -> Simulation:
    """Return a simulation of a Quorum job in pods of eight ranks."""
    settings = RoundSettings(mode=Mode.QUORUM, quorum_percent=75, bench_after_ns=10**9)
    world = World(
        replicas=ranks // PROCS,
        procs=PROCS,
        settings=settings,
        leases=leases_each * ranks,
        delay_ms=(HOP_MS, HOP_MS),
        step_ms=(180, 220),
        stream_ms=0.0,
    )
    sim = Simulation(world, seed)
    sim.checkers.every = ranks // LOOKED_AT
    send_state = sim.links.send_state

    def shares_its_link(
        src: MemberId, dst: MemberId, state: m.StateTransfer, copy: tuple[Sum, Sum]
    ) -> None:
        sim.after(BRANCHES * state_ms, lambda: send_state(src, dst, state, copy))

    setattr(sim.links, "send_state", shares_its_link)  # noqa: B010
    return sim


class Watch:
    """Times of commits and registrations, recorded while a simulation runs."""

    def __init__(self, sim: Simulation) -> None:
        self.first_ns: dict[GenerationId, int] = {}
        self.last_ns: dict[GenerationId, int] = {}
        self.all_active_ns: int | None = None
        """Time of the first commit at which all ranks of the world were active."""
        self.registered_ns: dict[MemberId, int] = {}
        """Time of the last registration that each rank sent to a coordinator."""
        self._sim = sim
        self._committed = sim.checkers.committed
        setattr(sim.checkers, "committed", self._see)  # noqa: B010
        self._to_coordinators = sim.to_coordinators
        setattr(sim, "to_coordinators", self._hear)  # noqa: B010

    def _see(self, rank: SimRank, go: Go, weighing: Weighing) -> None:
        self._committed(rank, go, weighing)
        sim, world = self._sim, self._sim.world
        self.first_ns.setdefault(go.generation, sim.now)
        self.last_ns[go.generation] = sim.now
        everybody = len(rank.state.log.active) == world.replicas * world.procs
        if everybody and self.all_active_ns is None:
            self.all_active_ns = sim.now

    def _hear(self, event: coord.Event, name: str | None = None) -> None:
        if isinstance(event, coord.FromRank) and isinstance(event.message, m.Register):
            self.registered_ns[event.message.member] = self._sim.now
        self._to_coordinators(event, name)

    def still_ms(self) -> list[float]:
        """Return the time from each generation's last commit to the first one of the next."""
        pairs = pairwise(sorted(self.first_ns))
        return [(self.first_ns[b] - self.last_ns[a]) / MS for a, b in pairs]


class Took(NamedTuple):
    """Durations that one measurement gave."""

    start_s: float
    """Time from the last registration until all ranks are active."""
    still_s: float
    """Longest pause of rounds at a death and at the join after it: from the last commit on any rank
    before a change to the first one after it. It includes a step of 0.2 s."""


def measure(ranks: int, *, state_ms: float) -> Took:
    """Start a job, kill a rank, let its replacement join, and return how long these took."""
    sim = large(ranks, leases_each=5, state_ms=state_ms)
    watch = Watch(sim)
    sim.start()
    while watch.all_active_ns is None:
        sim.run_until(sim.heap[0][0] + 1)
    registered_ns = max(watch.registered_ns.values())
    start_s = (watch.all_active_ns - registered_ns) / 1e9
    sim.kill(next(x for x in reversed(sim.ranks)), restart=True)
    before = len(watch.first_ns)
    sim.run()
    sim.checkers.at_end()
    assert len(sim.checkers.gen_of) >= 3, "the start, a death and a join"
    return Took(start_s, max(watch.still_ms()[before - 1 :]) / 1000)


def main() -> None:
    """Measure the sizes on the command line and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=(256, 1024))
    for ranks in parser.parse_args().ranks:
        took = measure(ranks, state_ms=STATE_MS)
        sys.stdout.write(
            f"{ranks} ranks: everybody active {took.start_s:.2f} s after the last registration, "
            f"rounds stand still for {took.still_s:.2f} s at most\n"
        )


if __name__ == "__main__":
    main()
