"""Hypothesis strategies for jobs and for the faults that happen to them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from paceline.core.protocol.tree import TREE_ABOVE
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy, Mode, Normalisation, Pacing

from testing.examples import examples
from testing.simulation.faults import BY_CHANCE, Fault, Kind, plant, plant_at_the_end
from testing.simulation.simulation import Simulation
from testing.simulation.world import MS, World

SOAK = int(os.environ.get("PACELINE_SOAK", "0"))
"""Examples per property in a long search, for example PACELINE_SOAK=20000. It draws other examples
in each run; a failure prints the history as `run(World(...), seed, [Fault(...)])`, which replays
it."""


def bounded(count: int) -> settings:
    """Return settings that draw the same `count` examples in each run, or other ones in a soak."""
    return settings(
        max_examples=SOAK or examples(count),
        derandomize=not SOAK,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


seeds = st.integers(0, 2**32 - 1)


@st.composite
def modes(draw: st.DrawFn, ranks: int) -> RoundSettings:
    """Draw the settings of a job's rounds."""
    return RoundSettings(
        mode=draw(st.sampled_from(Mode)),
        quorum=draw(st.integers(1, ranks)),
        quorum_percent=draw(st.sampled_from([0, 50])),
        random_initiator=draw(st.booleans()),
        deadline_ns=draw(st.sampled_from([0, 5 * MS, 15 * MS])),
        grace_ns=draw(st.sampled_from([-1, 0, 2 * MS])),
        warmup_rounds=draw(st.sampled_from([0, 0, 3])),
        full_every=draw(st.sampled_from([0, 0, 5])),
        max_age=draw(st.sampled_from([0, 2, 4])),
        late=draw(st.sampled_from(MaxAgePolicy)),
        normalisation=draw(st.sampled_from(Normalisation)),
        pacing=draw(st.sampled_from(Pacing)),
        bench_after_ns=300 * MS,
        buffers_every=draw(st.sampled_from([0, 3])),
        pipeline=draw(st.sampled_from([0, 0, 1])),
    )


@st.composite
def worlds(draw: st.DrawFn, replicas: int | None = None, procs: int | None = None) -> World:
    """Draw a job with its links and its disk."""
    n = replicas or draw(st.sampled_from([1, 2, 3, 5]))
    per_pod = procs or draw(st.sampled_from([1, 1, 2, 3]))
    return World(
        replicas=n,
        procs=per_pod,
        settings=draw(modes(n * per_pod)),
        leases=draw(st.sampled_from([0, 6, 20, 40])),
        quota=draw(st.sampled_from([0, 10])),
        accumulate=draw(st.sampled_from([1, 1, 3])),
        uneven=draw(st.booleans()),
        epochs=draw(st.sampled_from([1, 2])),
        lookahead=draw(st.sampled_from([2, 2, 5])),
        slow=draw(st.sampled_from([{}, {0: 4.0}, {n - 1: 3.0}])),
        nan=draw(st.sampled_from([0.0, 0.0, 0.05])),
        skip=draw(st.sampled_from([0.0, 0.0, 0.05])),
        rest=draw(st.sampled_from([0.0, 0.0, 0.05])),
        segments=draw(st.sampled_from([1, 2, 4])),
        discard=draw(st.sampled_from([0.0, 0.0, 0.1])),
        rewrite=draw(st.sampled_from([0.0, 0.0, 0.1])),
        misjudge=draw(st.sampled_from([0.0, 0.0, 0.1])),
        save_every=draw(st.sampled_from([0, 1, 3])),
        disk_full=draw(st.sampled_from([0.0, 0.0, 0.3])),
        tree_above=draw(st.sampled_from([TREE_ABOVE, 0])),
        pause_ms=draw(st.sampled_from([0.0, 0.0, 15.0])),
        stabilization_ms=draw(st.sampled_from([0, 30, 200])),
        allowed=draw(st.sampled_from([(), (), (1, n, n + 2), (n, n + 1), (max(1, n - 1), n)])),
    )


def faults(*kinds: Kind, most: int = 6) -> st.SearchStrategy[list[Fault]]:
    """Draw up to `most` faults of these kinds within the first 900 ms."""
    one = st.builds(
        Fault,
        at_ms=st.floats(0, 900),
        kind=st.sampled_from(kinds or BY_CHANCE),
        ms=st.floats(5, 1200),
        pick=st.integers(0, 99),
    )
    return st.lists(one, max_size=most)


def faults_at_the_end(most: int = 5) -> st.SearchStrategy[list[Fault]]:
    """Draw faults around the release; their times count from the last round."""
    one = st.builds(
        Fault,
        at_ms=st.floats(0, 200),
        kind=st.sampled_from(BY_CHANCE),
        ms=st.floats(1, 300),
        pick=st.integers(0, 99),
    )
    return st.lists(one, min_size=1, max_size=most)


def run(
    world: World, seed: int, what: list[Fault], at_the_end: list[Fault] | None = None
) -> Simulation:
    """Run one history to its end; raises BrokenPromiseError with its story if a promise breaks."""
    sim = Simulation(world, seed)
    sim.start()
    plant(sim, what)
    plant_at_the_end(sim, at_the_end or [])
    sim.run()
    if sim.finished:
        sim.checkers.at_end()
    return sim
