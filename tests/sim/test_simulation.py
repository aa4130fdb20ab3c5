"""The invariants I1 to I18 on whole jobs, on a virtual clock.

The checkers run after every event, so most tests only say what kind of history is drawn. A failure
prints the history and its story. PACELINE_SOAK=20000 searches longer (testing/simulation).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core.coordinator import silence
from paceline.core.protocol.records import DropReason, Gen, Go, Trigger
from paceline.core.protocol.sampling import samples_of
from paceline.core.rank import events as ev
from paceline.core.rank import script
from paceline.core.rank.state import RankState
from paceline_api.ids import MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy, Mode, Normalisation, Pacing

from testing.examples import some
from testing.simulation.checkers import composed
from testing.simulation.faults import FOR_EVER_MS, Fault, Kind, plant
from testing.simulation.histories import bounded, faults, faults_at_the_end, run, seeds, worlds
from testing.simulation.ranks import SimRank
from testing.simulation.simulation import BrokenPromiseError, Simulation
from testing.simulation.world import MS, World

UNREST = script._unrest
TRUE_VERDICTS = {"StateLost", "Interrupted"}
"""Outcomes of a job that failed through no fault of its own; `Checkers.job_failed` verifies them.
"""


def rounds(sim: Simulation) -> list[Go]:
    history = sim.checkers.history(sim.finished[0].state.log.digest)
    return [r for r in history if isinstance(r, Go)]


# ---- any history ---------------------------------------------------------------------------------


@pytest.mark.long
@bounded(150)
@given(worlds(), seeds)
def test_a_job_without_faults_completes_on_all_ranks(world: World, seed: int) -> None:
    sim = run(world, seed, [])
    assert len(sim.finished) == world.replicas * world.procs
    assert sim.outcomes <= {"Complete"}


@bounded(500)
@given(worlds(), seeds, faults())
@pytest.mark.long
def test_the_invariants_hold_under_any_faults(world: World, seed: int, what: list[Fault]) -> None:
    sim = run(world, seed, what)
    assert sim.finished or sim.outcomes & TRUE_VERDICTS
    proposals = sum(c.state.counter for c in sim.all_coordinators)
    assert proposals <= 12 + 10 * len(what), f"a storm of {proposals} proposals\n{sim.story()}"


@bounded(150)
@given(worlds(), seeds, faults(most=2), faults_at_the_end())
@pytest.mark.long
def test_a_complete_job_stays_complete_under_faults_at_the_end(
    world: World, seed: int, what: list[Fault], at_the_end: list[Fault]
) -> None:
    """Faults strike while the ranks are released and afterwards (R17, C1).

    The checkers verify at each verdict that it does not contradict a rank that has finished.
    """
    sim = run(dataclasses.replace(world, after_ms=150.0), seed, what, at_the_end)
    assert sim.finished or sim.outcomes & TRUE_VERDICTS, sim.story()
    assert sim.outcomes <= {"Complete", *TRUE_VERDICTS}, sim.story()


@pytest.mark.long
@bounded(100)
@given(
    worlds(),
    seeds,
    faults(Kind.RAISE, Kind.RAISE, Kind.KILL, Kind.CRASH, Kind.RECONNECT, Kind.JOIN),
)
def test_a_script_error_ends_the_job_when_a_second_rank_raises_it(
    world: World, seed: int, what: list[Fault]
) -> None:
    """The rule holds beside other deaths and with coordinators that restart (R55).

    An error that only one rank has met ends a job only before it has trained, or if that rank alone
    had the weights.
    """
    sim = run(world, seed, what)
    failures = [dead for pod in sim.pods.values() for dead in pod.failures]
    places = {dead.member[:2] for dead in failures}
    blamed = "ScriptFailed" in sim.outcomes
    assert sim.finished or blamed or sim.outcomes & TRUE_VERDICTS, sim.story()
    assert not blamed or failures, sim.story()
    if len(places) > 1 and not sim.finished and not sim.outcomes & TRUE_VERDICTS:
        assert blamed, sim.story()
    for coordinator in sim.all_coordinators:
        known = {dead.member[:2] for dead in coordinator.state.script_failures}
        ended = coordinator.outcome
        if ended is not None and ended.complete and known:
            assert "the script failed" in ended.message, sim.story()
        stopped = any(rank.stopped for rank in coordinator.state.roster.ranks.values())
        if len(known) > 1 and not stopped:
            assert ended is not None, sim.story()
            assert not ended.complete, sim.story()


@bounded(200)
@given(
    worlds(),
    seeds,
    st.integers(1, 3),
    faults(
        *(Kind.BAD, Kind.BAD, Kind.BAD, Kind.KILL, Kind.CRASH, Kind.TWIN, Kind.RECONNECT),
        *(Kind.JOIN, Kind.WIPE, Kind.DRAIN, Kind.HANG),
    ),
)
@pytest.mark.long
def test_a_batch_that_makes_scripts_fail_is_skipped_and_counted(
    world: World, seed: int, most: int, what: list[Fault]
) -> None:
    """Exactly the samples of these batches are missing, under any other faults (R56).

    Coordinators restart and checkpoints are restored. The checkers compare the ledger with what was
    applied.
    """
    sim = run(dataclasses.replace(world, max_skipped=most), seed, what)
    assert sim.finished or sim.outcomes & {"ScriptFailed", *TRUE_VERDICTS}, sim.story()
    failures = [dead for pod in sim.pods.values() for dead in pod.failures]
    met = Counter(dead.batch.lease for dead in failures if dead.batch is not None)
    assert "ScriptFailed" not in sim.outcomes or met, sim.story()
    for rank in sim.finished:
        log, plan = rank.state.log, world.plan
        assert len(log.skips) <= most, sim.story()
        assert all(met[lease] > 1 for lease in log.skips), sim.story()
        failed = log.ledger.dropped.get(DropReason.FAILED, 0)
        allowed = sum(samples_of(plan, lease) for lease in log.skips)
        assert failed <= allowed, sim.story()


GIVES_UP = World(replicas=4, leases=40, max_skipped=2, until_ms=20_000)


@pytest.mark.long
def test_a_bad_batch_loses_its_samples_but_not_the_job() -> None:
    """The bad batch may be any lease, including the last one.

    The rule also holds across a new coordinator, and after a restore from a checkpoint made before
    or after.
    """
    world, plan = dataclasses.replace(GIVES_UP, save_every=1), GIVES_UP.plan
    for lease in (0, 1, 17, 38, 39):
        for more in (
            *([], [Fault(150, Kind.CRASH)], [Fault(120, Kind.KILL)]),
            *([Fault(at_ms, Kind.WIPE)] for at_ms in range(200, 800, 200)),
            [Fault(300, Kind.WIPE), Fault(301, Kind.CRASH)],
        ):
            sim = run(world, lease, [Fault(0, Kind.BAD, pick=lease), *more])
            assert sim.outcomes <= {"Complete"}, sim.story()
            assert sim.finished, sim.story()
            for rank in sim.finished:
                log = rank.state.log
                assert log.skips == {lease}, sim.story()
                assert log.ledger.dropped == {DropReason.FAILED: samples_of(plan, lease)}


def test_one_bad_batch_more_than_allowed_fails_the_job() -> None:
    bad = [Fault(0, Kind.BAD, pick=lease) for lease in (5, 15, 25)]
    assert run(GIVES_UP, 1, bad[:2]).finished
    assert run(GIVES_UP, 1, bad).outcomes == {"ScriptFailed"}
    assert run(dataclasses.replace(GIVES_UP, max_skipped=0), 1, bad[:1]).outcomes == {
        "ScriptFailed"
    }


def test_without_r56_a_bad_batch_kills_one_rank_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "drop_given_up", lambda _: None)
    try:
        sim = run(GIVES_UP, 1, [Fault(0, Kind.BAD, pick=17)])
    except BrokenPromiseError:
        return
    assert not sim.finished


@pytest.mark.long
@bounded(200)
@given(worlds(), seeds, faults())
def test_a_script_that_stops_the_job_stops_it_on_all_ranks(
    world: World, seed: int, what: list[Fault]
) -> None:
    sim = run(dataclasses.replace(world, stop=0.1), seed, what)
    assert sim.finished or sim.outcomes & TRUE_VERDICTS, sim.story()
    assert sim.outcomes <= {"Complete", *TRUE_VERDICTS}, sim.story()
    logs = [r.state.log for r in sim.finished]
    assert len({(log.version, log.digest, log.publisher) for log in logs}) <= 1, sim.story()


@pytest.mark.long
def test_without_a_coordinator_rounds_continue_and_changes_wait() -> None:
    """A new coordinator admits a joiner that has waited for it (R10)."""
    sim = Simulation(World(replicas=2, leases=400), 2)
    sim.start()
    sim.run_until(200 * MS)
    ranks = list(sim.ranks.values())
    sim.kill_coordinator("a")
    before = [rank.state.log.version for rank in ranks]
    sim.start_pod(2)
    sim.run_until(500 * MS)
    assert all(r.state.log.version > v + 10 for r, v in zip(ranks, before, strict=True))
    assert {len(rank.state.log.members) for rank in ranks} == {2}
    sim.start_coordinator("b")
    sim.run()
    sim.checkers.at_end()
    assert len(sim.finished) == 3


def test_a_rank_that_stops_the_job_becomes_its_publisher() -> None:
    """The rank stops the job in each mode, long before the data end; the others keep stepping."""
    for mode in Mode:
        settings = RoundSettings(mode=mode, quorum=2, deadline_ns=5 * MS, bench_after_ns=10**9)
        sim = Simulation(World(replicas=3, settings=settings, leases=500), 3)
        sim.start()
        sim.after(200, lambda sim=sim: sim.ranks[MemberId(1, 0, 0)].ends_the_job())  # type: ignore[misc]
        sim.run()
        sim.checkers.at_end()
        assert len(sim.finished) == 3
        log = sim.finished[0].state.log
        assert log.publisher == log.stopped_by == MemberId(1, 0, 0)
        assert log.is_worked_off, "its checkpoint is the end of the job (C1)"
        assert log.version < 100


@pytest.mark.parametrize("when", ["all evaluate", "benched", "draining"])
def test_a_stop_takes_effect_even_if_the_rank_evaluates_is_benched_or_drains(when: str) -> None:
    mode = Mode.SOLO if when == "all evaluate" else Mode.FULL  # Full waits for ranks that evaluate.
    patience = RoundSettings(mode, bench_after_ns=(100 if when == "benched" else 10**6) * MS)
    sim = Simulation(World(replicas=3, leases=500, settings=patience), 5)
    sim.start()
    sim.run_until(200 * MS)
    ranks = list(sim.ranks.values())
    for rank in ranks if when == "all evaluate" else ranks[1:2]:
        rank.hung = True
    sim.run_until(500 * MS)
    if when == "all evaluate":
        for rank in ranks:
            rank.post(ev.Rest())
        sim.run_until(700 * MS)
        assert len(ranks[1].state.log.resting) == 3
    elif when == "benched":
        assert ranks[1].me in ranks[1].state.log.benched
    else:
        ranks[1].post(ev.Drain())
    ranks[1].post(ev.Finish(stop=True))
    if when == "all evaluate":
        for rank in ranks:
            sim.after(200, partial(rank.post, ev.Unrest()))
    sim.run()
    sim.checkers.at_end()
    assert len(sim.finished) == 3
    assert {rank.state.log.stopped_by for rank in ranks} == {ranks[1].me}


@pytest.mark.parametrize("seed", range(6))
def test_a_fatal_error_reported_between_coordinators_ends_the_job_with_its_reason(
    seed: int,
) -> None:
    """Any rank may report it at any time between two coordinators; the second one receives it."""
    sim = Simulation(World(replicas=3, leases=500), seed)
    sim.start()
    sim.run_until((150 + 10 * seed) * MS)
    for name in list(sim.coordinators):
        sim.kill_coordinator(name)
    sim.run_until((200 + 20 * seed) * MS)
    list(sim.ranks.values())[seed % 3].post(ev.NotRestored("its disk is gone"))
    sim.run_until(400 * MS)
    sim.start_coordinator("late")
    sim.run()
    assert sim.outcomes == {"CheckpointUnusable"}


@pytest.mark.long
def test_evaluation_pauses_all_ranks_in_full_mode() -> None:
    """Each rank evaluates after a third of its steps, for a different time.

    No round of mode Full lacks a rank, so there are as many rounds as without evaluation.
    """
    for mode in (Mode.FULL, Mode.SHADOW):
        for seed in range(4):
            settings = RoundSettings(mode=mode, bench_after_ns=10**9)
            sim = run(World(replicas=3, settings=settings, leases=90, rest=0.3), seed, [])
            log = sim.finished[0].state.log
            assert log.version == 30
            assert log.ledger.rounds == {Trigger.ALL: 30}


@pytest.mark.long
def test_a_rank_back_from_evaluation_has_no_fresh_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank waits for the round that includes its earlier gradient.

    If that round starts again after a death, the rank announces the gradient with its true age (R8,
    R11, I6).
    """
    settings = RoundSettings(mode=Mode.SOLO, bench_after_ns=300 * MS)
    world = World(replicas=3, rest=0.3, slow={0: 4.0}, settings=settings, until_ms=8_000)

    def histories() -> None:
        for seed in range(20):
            run(world, seed, [Fault(200.0, Kind.KILL, 150, 1)])

    histories()

    def waits_as_if_fresh(rank: RankState) -> None:
        UNREST(rank)
        if rank.share is not None and rank.share.count:
            rank.waits_for = rank.log.version

    monkeypatch.setattr(script, "_is_named_as_idle", lambda _: False)
    monkeypatch.setattr(script, "_unrest", waits_as_if_fresh)
    with pytest.raises(AssertionError, match="I6"):
        histories()


@pytest.mark.long
@pytest.mark.parametrize("kind", Kind)
def test_the_invariants_hold_under_repeated_faults_of_one_kind(kind: Kind) -> None:
    @bounded(25)
    @given(worlds(), seeds, faults(kind, most=4))
    def history(world: World, seed: int, what: list[Fault]) -> None:
        sim = run(world, seed, what)
        harmless = kind not in (
            *(Kind.LOSE, Kind.KILL, Kind.ORPHAN, Kind.WIPE),
            *(Kind.DRAIN, Kind.FREEZE, Kind.STUCK, Kind.RAISE, Kind.BAD),
        )
        assert sim.finished or not harmless or world.replicas == 1, sim.story()

    history()


@pytest.mark.long
@bounded(60)
@given(worlds(3), seeds, faults(Kind.CRASH, Kind.TWIN, Kind.SLEEP, Kind.CUT, Kind.JOIN, Kind.LOSE))
def test_the_invariants_hold_with_coordinators_that_restart_and_compete(
    world: World, seed: int, what: list[Fault]
) -> None:
    sim = run(world, seed, what)
    assert sim.finished or "StateLost" in sim.outcomes, sim.story()


@pytest.mark.long
@bounded(40)
@given(worlds(3), seeds, faults(Kind.JOIN, Kind.SHRINK, Kind.DRAIN, Kind.MODE))
def test_the_invariants_hold_while_scaling_and_changing_the_mode(
    world: World, seed: int, what: list[Fault]
) -> None:
    sim = run(world, seed, what)
    assert sim.finished or "Interrupted" in sim.outcomes, sim.story()


@pytest.mark.long
@bounded(60)
@given(worlds(3), seeds, faults(Kind.KILL, Kind.LOSE, Kind.DRAIN, Kind.JOIN, Kind.SHRINK))
def test_the_invariants_hold_with_allowed_sizes(world: World, seed: int, what: list[Fault]) -> None:
    sim = run(dataclasses.replace(world, allowed=(1, 3, 5)), seed, what)
    assert sim.finished or sim.outcomes & TRUE_VERDICTS, sim.story()


@bounded(150)
@given(worlds(), seeds, faults(Kind.WIPE, Kind.CRASH, Kind.LOSE, Kind.JOIN, most=5))
@pytest.mark.long
def test_a_job_with_a_checkpoint_survives_the_death_of_all_ranks(
    world: World, seed: int, what: list[Fault]
) -> None:
    """A job with a checkpoint is never lost, and every sample counts once in the end (R26)."""
    sim = run(dataclasses.replace(world, save_every=2), seed, what)
    after_the_end = any("Released" in c.reasons for c in sim.all_coordinators)
    lost = not (sim.finished or after_the_end or "Interrupted" in sim.outcomes)
    assert not (lost and sim.checkers.kept), sim.story()


# ---- deaths at every step ------------------------------------------------------------------------


def event_times(world: World, seed: int, what: list[Fault], start: float, end: float) -> list[int]:
    """Return the times of all events between two moments of a history, in nanoseconds."""
    sim = Simulation(world, seed)
    sim.start()
    plant(sim, what)
    times: set[int] = set()
    at = sim.at

    def spy(at_ns: int, action: Callable[[], object]) -> None:
        times.add(at_ns)
        at(at_ns, action)

    setattr(sim, "at", spy)  # noqa: B010
    sim.run()
    return sorted(t for t in times if start * MS <= t <= end * MS)


def kill_at(world: World, seed: int, what: list[Fault], at_ns: int, slot: int) -> Simulation:
    sim = Simulation(world, seed)
    sim.start()
    plant(sim, what)

    def kill() -> None:
        pod = next(p for k, p in sorted(sim.pods.items()) if k[0] == slot and p.alive)
        sim.remove_pod(pod)
        sim.after(100, lambda: sim.start_pod(slot))

    sim.at(at_ns, kill)
    sim.run()
    sim.checkers.at_end()
    return sim


@pytest.mark.long
@pytest.mark.parametrize("mode", [Mode.FULL, Mode.SOLO])
def test_a_job_finishes_after_a_death_at_every_step_of_a_round(mode: Mode) -> None:
    world = World(replicas=3, settings=RoundSettings(mode=mode, bench_after_ns=300 * MS), leases=12)
    times = event_times(world, 11, [], 165, 205)
    assert len(times) > 20
    for at_ns in some(times):
        for slot in range(3):
            assert kill_at(world, 11, [], at_ns, slot).finished


@pytest.mark.parametrize("kind", [Kind.JOIN, Kind.DRAIN, Kind.CRASH])
@pytest.mark.long
def test_a_job_finishes_after_a_death_at_every_step_of_a_membership_change(kind: Kind) -> None:
    settings = RoundSettings(mode=Mode.QUORUM, quorum=2, bench_after_ns=300 * MS)
    world = World(replicas=3, settings=settings, leases=30)
    what = [Fault(175, kind, 30, 2)]
    times = event_times(world, 5, what, 175, 240)[::2]
    assert len(times) > 20
    for at_ns in some(times):
        for slot in range(3):
            assert kill_at(world, 5, what, at_ns, slot).finished


# ---- single promises -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("late", MaxAgePolicy)
@pytest.mark.parametrize("normalisation", Normalisation)
@pytest.mark.parametrize("pacing", [Pacing.ROUND, Pacing.SAMPLES])
def test_late_gradients_are_counted_as_each_late_policy_says(
    late: MaxAgePolicy, normalisation: Normalisation, pacing: Pacing
) -> None:
    """One rank is late all the time (I7, I12)."""
    settings = RoundSettings(
        mode=Mode.SOLO,
        max_age=2,
        late=late,
        normalisation=normalisation,
        pacing=pacing,
        bench_after_ns=500 * MS,
    )
    world = World(replicas=4, settings=settings, leases=60, slow={3: 9.0}, uneven=True)
    for seed in range(4):
        sim = run(world, seed, [])
        total = sim.finished[0].state.log.ledger.total()
        assert total.late > 0 or late is MaxAgePolicy.DROP
        assert (total.dropped > 0) <= (late is MaxAgePolicy.DROP)
        assert (total.discounted > 0) <= (late is MaxAgePolicy.DECAY)


@pytest.mark.parametrize("mode", [Mode.SOLO, Mode.QUORUM, Mode.MAJORITY, Mode.FULL, Mode.DEADLINE])
def test_a_main_thread_that_hangs_forever_blocks_no_other_rank(mode: Mode) -> None:
    """The bound is one `benchAfter` plus the rounds that remain (I8, I9)."""
    settings = RoundSettings(mode=mode, quorum=2, deadline_ns=10 * MS, bench_after_ns=300 * MS)
    world = World(replicas=3, settings=settings, leases=40)
    sim = Simulation(world, 3)
    sim.start()
    plant(sim, [Fault(150, Kind.HANG, 10**7, 1)])
    sim.run()
    sim.checkers.at_end()
    assert len(sim.finished) == 3
    total = sim.finished[0].state.log.ledger.total()
    assert total.applied == world.plan.samples, "the leases of the hung rank went to others"
    assert sim.now < 3000 * MS


def stuck_for_ever(seed: int) -> Simulation:
    """Run a job in which one of three communication threads gets stuck at some point of a round."""
    settings = RoundSettings(bench_after_ns=300 * MS)
    world = World(replicas=3, settings=settings, leases=40, until_ms=10_000)
    sim = Simulation(world, seed)
    sim.start()
    plant(sim, [Fault(150 + seed, Kind.STUCK, FOR_EVER_MS, seed)])
    sim.run()
    sim.checkers.at_end()
    return sim


@pytest.mark.long
def test_a_rank_with_a_stuck_communication_thread_is_replaced() -> None:
    """The bound is the longest work, an answer to PREPARE, and the rounds left (R35, I8)."""
    for seed in range(20):
        sim = stuck_for_ever(seed)
        reasons = [r for c in sim.all_coordinators for r in c.reasons]
        assert "RoundStuck" in reasons
        assert len(sim.finished) == 3, "the stuck one was killed by its agent and started again"
        assert sim.now < 3000 * MS


def test_without_r35_a_stuck_thread_hangs_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "break_off_the_stuck", lambda _: None)
    with pytest.raises(BrokenPromiseError, match="I8: not over"):
        stuck_for_ever(1)


def one_stands_by() -> Simulation:
    """Start four replicas of which one never comes, so two train and slot 2 is on standby."""
    settings = RoundSettings(bench_after_ns=10**9)
    world = World(replicas=4, allowed=(2, 4), leases=90, settle_ms=100, settings=settings)
    sim = Simulation(world, 3)
    sim.start()
    sim.after(1, lambda: sim.remove_pod(sim.pods[3, 0]))
    return sim


def test_a_standby_replica_replaces_a_dead_member() -> None:
    sim = one_stands_by()
    sim.after(400, lambda: sim.remove_pod(sim.pods[1, 0]))
    sim.run()
    sim.checkers.at_end()
    gens = [r for r in sim.checkers.history(sim.finished[0].state.log.digest) if isinstance(r, Gen)]
    slots = [[member.slot for member in gen.members] for gen in gens]
    assert slots == [[0, 1], [0, 2]], "in the change that leaves the dead one out"


def test_a_standby_replica_can_drain() -> None:
    sim = one_stands_by()
    sim.after(400, lambda: sim.drain((2, 0)))
    sim.run()
    sim.checkers.at_end()
    [gone] = [r for r in sim.ranks.values() if r.me.slot == 2]
    assert gone.exit is not None
    assert gone.exit.why == "drained, and not needed by the group"
    assert len(sim.finished) == 2


def test_a_benched_rank_returns_and_contributes() -> None:
    settings = RoundSettings(mode=Mode.FULL, bench_after_ns=200 * MS)
    world = World(replicas=3, settings=settings, leases=90)
    sim = run(world, 3, [Fault(150, Kind.HANG, 500, 1)])
    history = rounds(sim)
    [benched] = [b.member for go in history for b in go.benched]
    at = next(go.round for go in history if go.benched)
    back = next(go.round for go in history if benched in go.admitted)
    assert at < back
    story = sim.checkers.history(sim.finished[0].state.log.digest)
    later = [shares for go, shares in composed(story) if go.round > back]
    assert benched in {s.member for shares in later for s in shares if s.count}


@pytest.mark.long
def test_a_quorum_of_all_ranks_equals_full_mode() -> None:
    """The rounds and their contributions are the same (I10)."""
    for seed in range(8):
        full = RoundSettings(mode=Mode.FULL, bench_after_ns=500 * MS)
        quorum = replace(full, mode=Mode.QUORUM, quorum=4, grace_ns=0)
        one, two = (run(World(replicas=4, settings=s, leases=30), seed, []) for s in (full, quorum))
        assert rounds(one) == rounds(two)
        assert one.finished[0].weights == two.finished[0].weights


@pytest.mark.long
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_slow_rank_contributes_in_proportion_to_its_speed(factor: int) -> None:
    """A rank slower by a factor f contributes about 1/f of what another one does (I16)."""
    settings = RoundSettings(mode=Mode.QUORUM, quorum=3, max_age=0, bench_after_ns=1000 * MS)
    world = World(replicas=4, settings=settings, leases=300, slow={3: float(factor)})
    sim = run(world, 1, [])
    applied = [t.applied for _, t in sorted(sim.finished[0].state.log.ledger.by_member.items())]
    others = sum(applied[:3]) / 3
    assert 0.6 * others / factor <= applied[3] < others, applied


@pytest.mark.long
def test_a_self_fed_job_does_not_end_while_all_ranks_evaluate() -> None:
    """All ranks evaluate at the same time; the job ends only when all loops have ended."""
    world = World(
        replicas=2, leases=0, steps=12, rest=0.5, settings=RoundSettings(bench_after_ns=10**9)
    )
    for seed in range(20):
        sim = run(world, seed, [])
        assert [r.steps for r in sim.finished] == [12, 12]


@pytest.mark.long
@pytest.mark.parametrize("mode", Mode)
def test_a_self_fed_job_with_a_step_quota_ends_at_that_step_on_all_ranks(mode: Mode) -> None:
    """The end does not depend on the mode or on ranks that die and come back."""
    settings = RoundSettings(mode=mode, quorum=2, deadline_ns=5 * MS, bench_after_ns=10**9)
    world = World(replicas=3, leases=0, quota=40, settings=settings)
    for seed in range(4):
        sim = run(world, seed, [Fault(200, Kind.KILL, 50, 1), Fault(250, Kind.JOIN, 50, 0)])
        assert sim.finished
        assert {r.state.log.steps for r in sim.finished} == {sim.finished[0].state.log.steps}
        ends = [(r.resumed[-1], r.state.log) for r in sim.finished]
        assert all(last.progress.step == int(log.steps) for last, log in ends if last.stopped)
        if mode in (Mode.FULL, Mode.SHADOW):
            assert sim.finished[0].state.log.updates == 40
        late = [r for r in sim.ranks.values() if r.me.attempt or r.me.slot == 3]
        assert any(r.resumed and r.resumed[0].progress.step for r in late), "they go on from there"


def test_a_rank_whose_loop_has_ended_is_not_the_publisher() -> None:
    """A fast self-fed rank waits for the others with old weights in its model."""
    world = World(
        replicas=3, leases=0, steps=20, settings=RoundSettings(mode=Mode.SOLO), slow={2: 6.0}
    )
    sim = Simulation(world, 1)
    sim.start()
    states = set()
    before = sim.checkers.after_event

    def watch(rank: SimRank, state: tuple[object, ...] | None) -> None:
        before(rank, state)
        log = rank.state.log
        if log.active and not log.stopped:
            states.add((len(log.done), log.publisher in log.done))

    setattr(sim.checkers, "after_event", watch)  # noqa: B010
    sim.run()
    assert (2, False) in states
    assert not any(idle for _, idle in states)


def test_a_stop_request_ends_the_job_at_the_same_round_on_all_ranks() -> None:
    world = World(replicas=3, leases=400)
    sim = Simulation(world, 2)
    sim.start()
    sim.after(300, lambda: sim.set_targets(m.Targets(stop=True)))
    sim.run()
    sim.checkers.at_end()
    assert len(sim.finished) == 3
    assert rounds(sim)[-1].request is not None
    assert sim.now < 1000 * MS


def test_a_request_made_before_the_ranks_report_their_log_is_not_lost() -> None:
    """A new coordinator receives the request before the numbers in the log (R18)."""
    world = World(replicas=2, leases=400)
    sim = Simulation(world, 4)
    sim.start()
    sim.after(200, lambda: sim.set_targets(m.Targets(settings=RoundSettings(mode=Mode.SOLO))))
    sim.after(300, lambda: sim.kill_coordinator("a"))

    def restart() -> None:
        sim.start_coordinator("b")
        sim.set_targets(m.Targets(stop=True))

    sim.after(320, restart)
    sim.run()
    assert len(sim.finished) == 2
    assert sim.finished[0].state.log.request == 2
    assert sim.now < 1500 * MS


def test_random_initiator_rounds_are_never_triggered_by_a_quorum() -> None:
    settings = RoundSettings(mode=Mode.MAJORITY, random_initiator=True, bench_after_ns=500 * MS)
    sim = run(World(replicas=5, settings=settings, leases=60), 3, [])
    triggers = {go.trigger for go in rounds(sim)}
    assert Trigger.INITIATOR in triggers
    assert Trigger.QUORUM not in triggers


@pytest.mark.long
@bounded(30)
@given(worlds(2), seeds, st.integers(0, 400))
def test_the_same_seed_gives_the_same_history(world: World, seed: int, at_ms: int) -> None:
    what = [Fault(at_ms, Kind.LOSE, 100, 1), Fault(at_ms + 50, Kind.CRASH, 50, 0)]
    one, two = (run(world, seed, what) for _ in range(2))
    assert one.lines == two.lines


@pytest.mark.long
def test_per_round_memory_of_a_rank_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a rank stores per round outlives the round (R7, R15)."""
    world = World(replicas=3, leases=300, settings=RoundSettings(mode=Mode.SOLO), slow={2: 5.0})
    sim = Simulation(world, 6)
    sim.start()
    worst = 0
    before = sim.checkers.after_event

    def watch(rank: SimRank, state: tuple[object, ...] | None) -> None:
        nonlocal worst
        before(rank, state)
        s = rank.state
        kept = len(s.words) + len(s.gos) + len(s.early) + len(s.log.recent) + len(s.hashes)
        worst = max(worst, kept)

    monkeypatch.setattr(sim.checkers, "after_event", watch)
    sim.run()
    assert rounds(sim)[-1].round > 100
    assert worst < 20, worst
