"""Partial rounds of scripts that step their own optimizers (S17)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_field
from paceline.core.protocol import records
from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.log import Log
from paceline.core.protocol.places import Spot
from paceline.core.rank import events as ev
from paceline.core.rank import rounds, script
from paceline.core.rank.state import RankState
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.simulation.faults import Fault, Kind
from testing.simulation.histories import bounded, faults, seeds
from testing.simulation.scripts import ScriptSimulation, ScriptWorld, run_script
from testing.simulation.simulation import BrokenPromiseError
from testing.simulation.world import MS

pytestmark = pytest.mark.long

ENDS = {"Complete"}
KINDS = (
    *(Kind.KILL, Kind.KILL, Kind.LOSE, Kind.ORPHAN, Kind.CRASH, Kind.TWIN, Kind.JOIN),
    *(Kind.DRAIN, Kind.RECONNECT, Kind.CUT, Kind.BREAK, Kind.FREEZE),
)
VERDICTS = {"StateLost", "Interrupted"}


@st.composite
def modes(draw: st.DrawFn) -> RoundSettings:
    """Draw the settings of partial rounds."""
    mode = draw(st.sampled_from([Mode.SOLO, Mode.QUORUM, Mode.MAJORITY, Mode.DEADLINE]))
    return RoundSettings(
        mode=mode,
        quorum=draw(st.sampled_from([0, 1, 2])),
        quorum_percent=75,
        random_initiator=draw(st.booleans()),
        deadline_ns=draw(st.sampled_from([0, 5 * MS])),
        grace_ns=draw(st.sampled_from([-1, 0, 2 * MS])),
        warmup_rounds=draw(st.sampled_from([0, 3])),
        full_every=draw(st.sampled_from([0, 0, 5])),
        hash_every=1,
    )


@st.composite
def worlds(draw: st.DrawFn) -> ScriptWorld:
    """Draw a program with late ranks, and the job that runs it."""
    points, passes = st.sampled_from([0, 1, 3]), st.sampled_from([1, 4, 9])
    program = [draw(points)]
    for _ in range(draw(st.integers(1, 3))):
        program += [draw(passes), draw(points)]
    return ScriptWorld(
        replicas=draw(st.sampled_from([2, 3, 4])),
        procs=draw(st.sampled_from([1, 1, 2])),
        settings=draw(modes()),
        program=tuple(program),
        calls_in_pass=draw(st.sampled_from([0, 0, 0, 1])),
        backwards=draw(st.sampled_from([1, 1, 1, 2])),
        kinds=draw(st.booleans()),
        lag=draw(st.sampled_from([0.1, 0.3])),
        lag_ms=draw(st.sampled_from([15.0, 60.0])),
        tree_above=draw(st.sampled_from([64, 64, 0])),
    )


def spots(world: ScriptWorld) -> list[Spot]:
    """Return all operations of a world's program."""
    per_batch = world.backwards + world.calls_in_pass
    return [
        Spot(place, number)
        for place, length in enumerate(world.program)
        for number in range(length * (per_batch if place % 2 else 1))
    ]


@bounded(40)
@given(worlds(), seeds)
def test_every_slot_goes_through_every_step_and_takes_its_average(
    world: ScriptWorld, seed: int
) -> None:
    """Values and weights are compared at each step, and the accounts after each event."""
    sim = run_script(world, seed, [])
    slots = world.replicas * world.procs
    assert sim.outcomes <= ENDS
    assert len(sim.finished) == slots
    for spot in spots(world):
        assert len(sim.values.of[spot]) == slots, spot
    assert sim.values.divisors <= {slots}, "each gradient has the weight of one slot"


@bounded(60)
@given(worlds(), seeds, faults(*KINDS, most=3))
def test_partial_rounds_keep_their_promises_under_any_faults(
    world: ScriptWorld, seed: int, what: list[Fault]
) -> None:
    sim = run_script(world, seed, what)
    assert sim.finished or sim.outcomes & VERDICTS, sim.story()


LATE = ScriptWorld(
    replicas=3,
    settings=RoundSettings(mode=Mode.QUORUM, quorum=2, grace_ns=0, hash_every=1),
    program=(1, 14, 1, 6, 0),
    lag=0.3,
)


def some(world: ScriptWorld = LATE, count: int = 6) -> list[ScriptSimulation]:
    """Run a few histories in which ranks are late."""
    sims = [run_script(world, seed, []) for seed in range(count)]
    assert all(sim.finished and sim.values.late for sim in sims)
    return sims


def test_late_gradients_are_applied_in_the_step_after_theirs() -> None:
    for sim in some():
        log = sim.finished[0].state.log
        total = log.ledger.total()
        assert total.late > 0
        assert total.applied + total.dropped == 20 * 3 * LATE.batch
        assert total.dropped <= 3 * LATE.batch, "at most one gradient of each slot, at the end"


def test_partial_rounds_are_faster_than_full_ones() -> None:
    full = replace(LATE, settings=RoundSettings(mode=Mode.FULL))
    partial = sum(sim.now for sim in some())
    assert partial < sum(run_script(full, seed, []).now for seed in range(6))


@pytest.mark.parametrize("kinds", [True, False])
def test_passes_that_cannot_be_late_wait_for_everybody(kinds: bool) -> None:
    """Two models in turn, and a pass that adds to an average (S17.5)."""
    world = replace(LATE, backwards=2, kinds=kinds)
    for seed in range(4):
        sim = run_script(world, seed, [])
        assert sim.finished[0].state.log.settles
        assert sim.values.late <= 3, "only before the second backward pass"


@pytest.mark.parametrize("seed", range(4))
def test_a_script_with_fewer_backward_passes_fails_by_name(seed: int) -> None:
    sim = run_script(replace(LATE, uneven=True, program=(1, 14)), seed, [])
    assert sim.outcomes == {"UnevenPasses"}
    ended = next(c.outcome for c in sim.all_coordinators if c.outcome is not None)
    assert "rank 0.0#0" in ended.message


@pytest.mark.parametrize("at_ms", range(90, 250, 10))
def test_a_rank_dies_while_another_one_is_late(at_ms: int) -> None:
    """Rank 2 is behind with a gradient pending when rank 1 dies around the end of a round."""
    sim = run_script(LATE, at_ms, [Fault(at_ms, Kind.KILL, 100, 1)])
    assert sim.finished


@pytest.mark.parametrize("at_ms", range(90, 250, 20))
def test_a_late_rank_and_then_all_others_die(at_ms: int) -> None:
    deaths = [Fault(at_ms + 5 * slot, Kind.KILL, 100, slot) for slot in (2, 0, 1)]
    sim = run_script(LATE, at_ms, deaths)
    assert sim.finished or sim.outcomes & VERDICTS, sim.story()


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ((0, 9, 0), Fault(111, Kind.DRAIN, 5, 0)),
        ((0, 4, 0), Fault(54, Kind.ORPHAN, 7, 0)),
    ],
    ids=["a rank that leaves", "a rank that joins when the scripts end"],
)
def test_weights_are_compared_only_where_scripts_have_those_of_the_job(
    program: tuple[int, ...], fault: Fault
) -> None:
    settings = RoundSettings(mode=Mode.SOLO, hash_every=1)
    world = ScriptWorld(
        replicas=2, settings=settings, program=program, lag=0.1, lag_ms=15, settle_ms=300
    )
    sim = run_script(world, 0, [fault])
    assert sim.finished
    assert len(sim.values.hashed) > 2


# ---- each rule is needed -------------------------------------------------------------------------


def fails(count: int = 6, world: ScriptWorld = LATE) -> None:
    """Check that some history breaks a promise."""
    with pytest.raises((BrokenPromiseError, AssertionError)):
        some(world, count)


def test_steps_that_run_ahead_of_a_late_rank_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S17.3: a rank that is two steps behind would take the wrong average."""
    monkeypatch.setattr(Arrivals, "_too_old_to_leave", lambda _: [])
    fails()


def test_calls_without_late_ranks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S17.7."""
    monkeypatch.setattr(records.Operation, "needs_everybody", False)
    fails(world=replace(LATE, calls_in_pass=1))


def test_a_gradient_left_at_the_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S17.12."""
    monkeypatch.setattr(script, "drop_at_the_end", lambda _: None)
    fails()


def test_a_late_rank_that_takes_no_average_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S17.2."""
    resume = script._resume

    def without(rank: RankState, *, fresh: bool, late: bool = False) -> None:
        resume(rank, fresh=fresh, late=late and False)

    monkeypatch.setattr(script, "_resume", without)
    fails()


def test_a_divisor_without_the_late_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S17.4."""
    monkeypatch.setattr(Log, "_computing", lambda *_: frozenset())
    fails()


def test_a_late_gradient_of_another_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S17.5: it would be added to gradients of other parameters."""
    monkeypatch.setattr(records.Operation, "kind", None)
    fails(world=replace(LATE, backwards=2, kinds=True))


def test_a_hash_of_a_rank_that_computes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S17.11: its weights may be those behind the step, and others have those before it."""
    reduced = rounds.on_reduced

    def with_all(rank: RankState, event: ev.Reduced) -> None:
        reduced(rank, event)
        applied = [each for each in rank.effects if isinstance(each, ev.Apply)]
        rank.effects[:] = [
            replace_field(each, hash=True) if each in applied else each for each in rank.effects
        ]

    monkeypatch.setattr(rounds, "on_reduced", with_all)
    fails()
