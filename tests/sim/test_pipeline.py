"""The pipeline (R36 to R38): each rule is tested, and what breaks if it is switched off.

The histories of `test_simulation` draw pipelined jobs as well; here every job is one.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from msgspec.structs import replace
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import Go, Share
from paceline.core.rank import rounds, script
from paceline.core.rank.events import Flush, Step
from paceline.core.rank.state import NOTHING, RankState
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy, Mode

from testing.examples import examples, some
from testing.simulation.checkers import composed
from testing.simulation.faults import Fault, Kind
from testing.simulation.histories import run
from testing.simulation.simulation import BrokenPromiseError, Simulation
from testing.simulation.world import MS, World
from tests.sim.test_simulation import event_times, kill_at

SEEDS = examples(20)
"""Number of histories within which a switched-off rule must break an invariant."""
FULL = RoundSettings(pipeline=1, bench_after_ns=300 * MS)
QUORUM = replace(FULL, mode=Mode.QUORUM, quorum=2)
CLEAN = World(replicas=3, settings=FULL, leases=40, until_ms=8_000)


def made(sim: Simulation) -> list[tuple[Go, tuple[Share, ...]]]:
    return composed(sim.checkers.history(sim.finished[0].state.log.digest))


def troubled(seed: int) -> tuple[World, list[Fault]]:
    draw = random.Random(seed)
    modes = [Mode.FULL, Mode.QUORUM, Mode.MAJORITY, Mode.SOLO, Mode.DEADLINE]
    world = World(
        replicas=draw.choice([1, 2, 3, 5]),
        segments=draw.choice([1, 4]),
        leases=draw.choice([0, 60]),
        quota=draw.choice([0, 20]),
        settings=replace(
            QUORUM,
            mode=draw.choice(modes),
            deadline_ns=5 * MS,
            late=draw.choice(list(MaxAgePolicy)),
            max_age=draw.choice([0, 2, 4]),
        ),
        slow=draw.choice([{}, {0: 4.0}]),
        nan=draw.choice([0.0, 0.1]),
        skip=draw.choice([0.0, 0.1]),
        rest=draw.choice([0.0, 0.1]),
        lookahead=draw.choice([2, 5]),
        save_every=draw.choice([0, 2]),
        tree_above=draw.choice([0, 64]),
        until_ms=20_000,
    )
    kinds = [Kind.HANG, Kind.KILL, Kind.DRAIN, Kind.CRASH, Kind.JOIN, Kind.FREEZE, Kind.MODE]
    faults = [Fault(draw.uniform(50, 400), draw.choice(kinds), 150, seed) for _ in range(3)]
    return world, faults


# ---- with all rules ------------------------------------------------------------------------------


def test_in_full_mode_each_gradient_lacks_exactly_one_update() -> None:
    first, *others = made(run(dataclasses.replace(CLEAN, leases=42), 1, []))
    assert {share.oldest for share in first[1]} == {0}
    assert {(go.round - s.oldest, s.count) for go, shares in others for s in shares} == {(1, 1)}
    assert all(go.ordinary and not go.listed for go, _ in others), "GO needs no words for them"


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.QUORUM])
def test_a_pipelined_round_overlaps_the_batch_with_the_reduction(mode: Mode) -> None:
    """Compare times on the virtual clock; the same samples must be applied."""
    ends = []
    for pipeline in (0, 1):
        rules = replace(QUORUM, mode=mode, pipeline=pipeline, max_age=0)
        sim = run(dataclasses.replace(CLEAN, settings=rules, leases=90), 1, [])
        ends.append((sim.now, sim.finished[0].state.log.ledger.total().applied))
    assert ends[0][1] == ends[1][1]
    assert ends[1][0] < 0.85 * ends[0][0]


def test_a_pipelined_job_streams_no_round() -> None:
    assert not any(
        go.streamed for go, _ in made(run(dataclasses.replace(CLEAN, segments=4), 1, []))
    )


def test_a_job_with_a_step_quota_ends_at_its_last_step() -> None:
    sim = run(dataclasses.replace(CLEAN, leases=0, quota=20), 1, [])
    assert sim.finished[0].state.log.version == 20


@pytest.mark.parametrize("late", MaxAgePolicy)
def test_a_permanently_slow_rank_is_late_and_blocks_no_other(late: MaxAgePolicy) -> None:
    rules = replace(QUORUM, late=late, max_age=2)
    sim = run(dataclasses.replace(CLEAN, settings=rules, slow={0: 5.0}), 1, [])
    total = sim.finished[0].state.log.ledger.total()
    assert total.late + total.dropped + total.discounted > 0 or late is MaxAgePolicy.WAIT
    assert len(sim.finished) == 3


def test_a_main_thread_that_hangs_forever_blocks_no_other_rank() -> None:
    for at_ms in (150.0, 153.0, 157.0, 161.0):
        sim = run(CLEAN, 3, [Fault(at_ms, Kind.HANG, 10**7, 1)])
        assert len(sim.finished) == 3
        assert sim.finished[0].state.log.ledger.total().applied == CLEAN.plan.samples


@pytest.mark.long
def test_the_invariants_hold_in_jobs_with_random_faults() -> None:
    for seed in range(examples(80)):
        world, faults = troubled(seed)
        sim = run(world, seed, faults)
        assert sim.finished or sim.outcomes & {"StateLost", "Interrupted"}, sim.story()


@pytest.mark.parametrize("rules", [FULL, QUORUM], ids=["Full", "Quorum"])
@pytest.mark.long
def test_a_job_finishes_after_a_death_at_every_step_of_a_round(rules: RoundSettings) -> None:
    world = World(replicas=3, settings=rules, leases=12)
    times = event_times(world, 11, [], 165, 195)
    assert len(times) > 20
    for at_ns in some(times):
        for slot in range(3):
            sim = kill_at(world, 11, [], at_ns, slot)
            total = sim.finished[0].state.log.ledger.total()
            assert total.applied + total.dropped == world.plan.samples


@pytest.mark.long
@pytest.mark.parametrize("kind", [Kind.JOIN, Kind.DRAIN, Kind.CRASH])
def test_a_membership_change_at_every_step_of_a_round_loses_no_samples(kind: Kind) -> None:
    for at_ns in some(event_times(CLEAN, 11, [], 165, 195)):
        sim = run(CLEAN, 11, [Fault(at_ns / MS, kind, 30, 2)])
        assert sim.finished[0].state.log.ledger.total().applied == CLEAN.plan.samples


# ---- each rule, and what breaks without it -------------------------------------------------------


def breaks(world: World, *faults: Fault) -> bool:
    """Return True if any history of such a job violates an invariant."""
    for seed in range(SEEDS):
        try:
            run(world, seed, list(faults))
        except (BrokenPromiseError, AssertionError, KeyError):
            return True
    return False


ON_STEP = script.on_step
ON_SCRIPT = script.on_script
SLOW = dataclasses.replace(CLEAN, settings=replace(QUORUM, quorum=1), slow={0: 4.0})


@pytest.mark.long
def test_r36_treating_a_gradient_that_lacks_two_updates_as_fresh_breaks_invariants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def takes_it_for_fresh(rank: RankState, event: Step) -> None:
        ON_STEP(rank, event)
        if rank.hands_on:
            rank.waits_for = 10**9

    assert not breaks(SLOW)
    monkeypatch.setattr(script, "on_step", takes_it_for_fresh)
    assert breaks(SLOW)


@pytest.mark.long
def test_r36_adding_to_an_announced_gradient_breaks_invariants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not breaks(SLOW)
    monkeypatch.setattr(script, "is_free", lambda _: True)
    assert breaks(SLOW)


@pytest.mark.long
def test_r37_the_next_step_waits_for_the_previous_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    world = dataclasses.replace(CLEAN, slow={0: 4.0})
    assert not breaks(world)
    monkeypatch.setattr(script, "waits_for_the_one_before", lambda _: False)
    assert breaks(world) or most_ahead(world) > 1


def most_ahead(world: World) -> int:
    """Return the largest number of gradients of one rank in a round of mode Full."""
    changes = [Fault(150.0 + 7 * n, Kind.JOIN, 30, 1) for n in range(3)]
    counts = [
        share.count
        for seed in range(SEEDS)
        for _, shares in made(run(world, seed, changes))
        for share in shares
        if not share.idle
    ]
    return max(counts)


@pytest.mark.long
def test_r37_arrive_announces_only_the_gradient_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule also holds when ARRIVE is sent again after a membership change."""
    world = dataclasses.replace(CLEAN, slow={0: 4.0}, leases=90)
    assert most_ahead(world) == 1
    monkeypatch.setattr(rounds, "is_for_later", lambda _: False)
    assert most_ahead(world) > 1


@pytest.mark.long
def test_r37_a_rank_that_evaluates_has_no_gradient_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lets_it_go(rank: RankState, event: Any) -> None:
        ON_SCRIPT(rank, event)
        if isinstance(event, Flush):
            before, rank.under_way = rank.under_way, NOTHING
            script._resume(rank, fresh=False)
            rank.under_way = before

    world = dataclasses.replace(CLEAN, rest=0.2)
    assert not breaks(world)
    monkeypatch.setattr(script, "on_script", lets_it_go)
    assert breaks(world)


@pytest.mark.long
def test_r38_the_next_batch_of_a_fresh_rank_uses_the_version_of_its_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the rule, a round that should wait for a gradient lets it become too old (I7)."""
    rules = replace(QUORUM, late=MaxAgePolicy.WAIT, max_age=2)
    world = dataclasses.replace(CLEAN, settings=rules, slow={0: 3.0})
    assert not breaks(world)
    monkeypatch.setattr(Log, "fresh_from", property(lambda log: log.version))
    assert breaks(world)
