"""Simulations of jobs large enough to use heads, with heads that die and freeze.

They also measure how long a start and a membership change take. Weights are checked on a sample of
the ranks.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.protocol.tree import TREE_ABOVE

from testing.simulation.faults import Fault, Kind
from testing.simulation.heads import harm_a_head, harm_who_collects
from testing.simulation.histories import bounded, faults, run, seeds, worlds
from testing.simulation.large import STATE_MS, large, measure
from testing.simulation.world import World


@pytest.mark.exhaustive
def test_256_ranks_lose_no_samples_when_heads_die_and_freeze() -> None:
    """One head dies holding announcements.

    Two freeze forever: one holding a GO, one holding announcements.
    """
    ranks = 256
    sim = large(ranks, leases_each=5)
    sim.start()
    died = harm_who_collects(sim, Kind.KILL, 1)
    frozen = harm_a_head(sim, Kind.FREEZE, 2)
    silent = harm_who_collects(sim, Kind.FREEZE, 4)
    sim.run()
    sim.checkers.at_end()
    [behind] = [waiting for _, waiting in frozen]
    assert behind == 15
    assert len({*died, *silent, frozen[0][0]}) == 3
    assert len(sim.finished) >= ranks - 3
    log = sim.finished[0].state.log
    assert log.ledger.total().applied == sim.world.plan.samples
    assert log.id.counter >= 4, "three changes at least"


@pytest.mark.long
def test_start_and_membership_change_of_a_large_job_stay_within_their_limits() -> None:
    """The limits are those of a job of 1,024 ranks (docs/scale.md).

    States travel in a tree, so an eighth of the ranks needs three tree steps less.
    """
    took = measure(2 * TREE_ABOVE, state_ms=STATE_MS)
    assert took.start_s <= 10 - 3 * 2 * STATE_MS / 1000
    assert took.still_s <= 1


@pytest.mark.long
@bounded(60)
@given(st.integers(3, 9).flatmap(lambda n: worlds(replicas=n, procs=1)), seeds, faults())
def test_the_invariants_hold_in_small_jobs_with_heads_under_any_faults(
    world: World, seed: int, what: list[Fault]
) -> None:
    """Use heads at 3 to 9 ranks (R41), with any faults."""
    sim = run(dataclasses.replace(world, tree_above=0), seed, what)
    assert sim.finished or sim.outcomes & {"StateLost", "Interrupted"}, sim.story()
