"""Scripts that step their own optimizers, in jobs that lose and gain ranks (S1-S14)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.coordinator.sizes import Sizes
from paceline.core.protocol.places import Spot
from paceline.core.protocol.records import Gen, Go
from paceline.core.rank import membership, script
from paceline.core.rank.state import RankState

from testing.simulation.faults import Fault, Kind
from testing.simulation.histories import bounded, faults, seeds
from testing.simulation.scripts import ScriptRank, ScriptWorld, run_script
from testing.simulation.simulation import BrokenPromiseError, Simulation

ENDS = {"Complete"}
KINDS = (
    *(Kind.KILL, Kind.KILL, Kind.LOSE, Kind.ORPHAN, Kind.CRASH, Kind.TWIN, Kind.JOIN),
    *(Kind.DRAIN, Kind.RECONNECT, Kind.CUT, Kind.BREAK, Kind.FREEZE),
)
VERDICTS = {"StateLost", "Interrupted"}


@st.composite
def worlds(draw: st.DrawFn) -> ScriptWorld:
    """Draw a program and the job that runs it."""
    points, passes = st.sampled_from([0, 1, 3]), st.sampled_from([1, 2, 5])
    program = [draw(points)]
    for _ in range(draw(st.integers(1, 3))):
        program += [draw(passes), draw(points)]
    return ScriptWorld(
        replicas=draw(st.sampled_from([1, 2, 3, 4])),
        procs=draw(st.sampled_from([1, 1, 2])),
        program=tuple(program),
        calls_in_pass=draw(st.sampled_from([0, 0, 1, 2])),
        evaluates=draw(st.sampled_from([0, 0, 1, 2, 3])),
        backwards=draw(st.sampled_from([1, 1, 2, 3])),
        kinds=draw(st.booleans()),
        uneven=draw(st.booleans()),
        segments=draw(st.sampled_from([1, 1, 2, 4])),
        call_in_backward=draw(st.sampled_from([False, False, True])),
        abandoned=draw(st.sampled_from([0.0, 0.0, 0.2])),
    )


@pytest.mark.long
@bounded(100)
@given(worlds(), seeds)
def test_a_script_without_faults_takes_every_batch_on_every_slot(
    world: ScriptWorld, seed: int
) -> None:
    sim = run_script(world, seed, [])
    assert sim.outcomes <= ENDS
    assert len(sim.finished) == world.replicas * world.procs


@bounded(300)
@given(worlds(), seeds, faults(*KINDS, most=3))
@pytest.mark.long
def test_every_operation_has_one_value_under_any_faults(
    world: ScriptWorld, seed: int, what: list[Fault]
) -> None:
    """The checks of `ScriptRank` and the invariants of all jobs hold in each history."""
    sim = run_script(world, seed, what)
    assert sim.finished or sim.outcomes & VERDICTS, sim.story()


WITH_A_KILL = [(seed, Fault(60 + seed * 37 % 300, Kind.KILL, 100, seed)) for seed in range(20)]


def loads(seed: int, fault: Fault) -> list[Spot]:
    """Return the spots at which a replacement loaded the state, in a history with one kill."""
    world = ScriptWorld(replicas=3, program=(2, 3, 12, 3, 1), calls_in_pass=seed % 2)
    return run_script(world, seed, [fault]).values.loaded


def all_loads() -> list[Spot]:
    return [spot for seed, fault in WITH_A_KILL for spot in loads(seed, fault)]


@pytest.mark.long
def test_a_replacement_repeats_what_is_over_and_loads_the_state_where_the_others_are() -> None:
    spots = all_loads()
    assert any(spot.is_at_point and spot.place for spot in spots)
    assert any(not spot.is_at_point and spot.number for spot in spots)


def test_a_state_sent_in_the_middle_of_a_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor waits in the operation that comes next; without this rule histories fail."""
    monkeypatch.setattr(membership, "_is_whole", lambda _: True)
    with pytest.raises(BrokenPromiseError):
        all_loads()


def test_a_replacement_made_active_with_its_first_copy_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first copy is older than the state; training from it gives other weights."""
    install = membership.install

    def keep_first(rank: RankState) -> None:
        install(rank)
        if rank.follows:
            rank.follows, rank.has_state = False, True

    monkeypatch.setattr(membership, "install", keep_first)
    with pytest.raises(BrokenPromiseError):
        all_loads()


def evaluations() -> tuple[list[Spot], set[str]]:
    """Run a script with buffers that evaluates within its passes.

    Returns:
        Spots within passes at which a state was loaded, and the outcomes of the jobs.
    """
    spots: list[Spot] = []
    outcomes: set[str] = set()
    for seed, fault in WITH_A_KILL[:8]:
        program = (seed % 2, 12, 1, 12, 1)
        world = ScriptWorld(replicas=3, program=program, evaluates=1 + seed % 3)
        sim = run_script(world, seed, [fault])
        spots += sim.values.loaded
        outcomes |= sim.outcomes
    return [spot for spot in spots if not spot.is_at_point], outcomes


@pytest.mark.long
def test_a_replacement_sends_buffers_where_the_others_do() -> None:
    """The donor waits where the forward pass, after an evaluation, has sent none."""
    spots, outcomes = evaluations()
    assert spots
    assert outcomes <= ENDS


@pytest.mark.long
def test_a_replacement_that_sends_buffers_with_its_first_batch_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DDP does so in a new process; the others may be past that call, or make none (S5)."""

    def as_new(rank: ScriptRank) -> None:
        rank.sending = True

    monkeypatch.setattr(ScriptRank, "begin_with_batch", as_new)
    assert "CallsDiffer" in evaluations()[1]


GROWN = (ScriptWorld(replicas=2, program=(2, 12, 12, 1)), 5, [Fault(60, Kind.JOIN, 100, 3)])


def test_a_rank_for_which_a_script_has_no_work_stands_by_to_the_end() -> None:
    """`Values.check` refuses a rank beyond those with which the script was started (S1)."""
    sim = run_script(*GROWN)
    assert sim.outcomes <= ENDS
    assert {rank.me.slot for rank in sim.finished} == {0, 1}
    assert any(me.slot == 2 for me in sim.ranks)


def test_a_rank_that_joins_beyond_those_of_a_script_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sizes, "_with_place", lambda _, ranks: set(ranks))
    with pytest.raises(BrokenPromiseError, match="of 2 ranks"):
        run_script(*GROWN)


@pytest.mark.parametrize("tree_above", [64, 0])
def test_ranks_in_different_calls_fail_the_job_with_both_lines(tree_above: int) -> None:
    world = ScriptWorld(replicas=3, program=(1, 2, 1), tree_above=tree_above, stray=1)
    sim = run_script(world, 0, [])
    assert sim.outcomes == {"CallsDiffer"}
    ended = next(c.outcome for c in sim.all_coordinators if c.outcome is not None)
    for text in ("all_reduce", "barrier", "train.py:1", "rank 1.0#0", "same calls in the same"):
        assert text in ended.message


def test_a_rank_that_goes_through_no_loader_fails_the_job_and_is_named() -> None:
    """The ranks make the same calls, so only their passes over the loader tell them apart."""
    sim = run_script(ScriptWorld(replicas=3, program=(0, 4), outside=1), 0, [])
    assert sim.outcomes == {"CallsDiffer"}
    ended = next(c.outcome for c in sim.all_coordinators if c.outcome is not None)
    for text in (
        *("rank 1.0#0", "in pass 1 over its data loader", "in no pass over its data loader"),
        *("go through their data loaders alike", "dispatch_batches", "train.py:1"),
    ):
        assert text in ended.message


def test_the_first_generation_waits_for_all_ranks() -> None:
    """Ranks know the number of slots before they start, and divide their data by it (S1)."""
    sim = run_script(ScriptWorld(replicas=3, procs=2), 3, [Fault(30, Kind.KILL, 100, 4)])
    history = sim.checkers.history(sim.finished[0].state.log.digest)
    first = next(record for record in history if isinstance(record, Gen))
    assert len(first.active) == len(first.with_state) == 6


# ---- backward passes whose segments are summed while they run ------------------------------------

STREAMED = ScriptWorld(replicas=3, segments=3, program=(2, 6, 1, 6, 1))


def rounds_of(sim: Simulation) -> list[Go]:
    """Return the rounds of a history that has come to its end."""
    history = sim.checkers.history(sim.finished[0].state.log.digest)
    return [record for record in history if isinstance(record, Go)]


def test_backward_passes_are_streamed_and_calls_are_not() -> None:
    made = rounds_of(run_script(STREAMED, 1, []))
    assert not any(go.void for go in made)
    for go in made:
        assert go.operation is None or not (go.streamed and go.operation.is_call)
    backward = [go for go in made if go.operation is not None and not go.operation.is_call]
    assert len(backward) == 12
    assert sum(go.streamed for go in backward) == 12


TROUBLED = ScriptWorld(replicas=3, segments=3, program=(1, 8, 1), step_ms=(5, 40))


def troubled(seed: int, **world: Any) -> Simulation:
    """Run a job that loses a rank while segments are under way."""
    fault = Fault(60 + seed * 31 % 250, Kind.KILL, 100, seed)
    return run_script(replace(TROUBLED, **world), seed, [fault])


@pytest.mark.long
@pytest.mark.parametrize("world", [{"call_in_backward": True}, {"abandoned": 0.3}])
def test_a_round_is_void_if_its_backward_pass_does_not_end_and_is_made_again(
    world: dict[str, Any],
) -> None:
    void = streamed = 0
    for seed in range(10):
        sim = troubled(seed, **world)
        made = rounds_of(sim)
        void += sum(go.void for go in made)
        streamed += sum(go.streamed for go in made)
        ended = [go for go in made if go.operation is not None and not go.operation.is_call]
        assert len(ended) == 8
    assert void
    assert streamed > void or "call_in_backward" in world


STRAY = replace(STREAMED, program=(0, 4, 0), step_ms=(30, 35), stray=1)


def test_a_call_on_one_rank_beside_segments_of_the_others_fails_the_job() -> None:
    """No round is streamed that adds a call to segments; it would come out void."""
    for seed in range(5):
        sim = run_script(STRAY, seed, [])
        assert sim.outcomes == {"CallsDiffer"}
        history = sim.checkers.history(next(iter(sim.ranks.values())).state.log.digest)
        assert not any(record.void for record in history if isinstance(record, Go))


@pytest.mark.long
def test_a_backward_pass_that_is_summed_after_another_operation_began_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_histories() -> None:
        for seed in range(20):
            troubled(seed, call_in_backward=True)

    all_histories()
    monkeypatch.setattr(script, "_drop_coming", lambda *_: None)
    with pytest.raises((BrokenPromiseError, KeyError)):  # a batch that was never announced
        all_histories()


@pytest.mark.parametrize("streams", [True, False])
def test_heads_forward_the_operation_that_their_ranks_are_about_to_make(streams: bool) -> None:
    """The first COMING of a group carries the operation in a job with heads."""
    world = replace(STREAMED, tree_above=0, call_in_backward=not streams)
    made = rounds_of(run_script(world, 2, []))
    assert streams == any(go.streamed and not go.void for go in made)
