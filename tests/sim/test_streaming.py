"""Streamed rounds (R28 to R34): each rule is tested, and what breaks if it is switched off.

The histories of `test_simulation` draw streamed rounds as well; here every job has them, and
scripts that drop a batch inside backward(), write a gradient twice, compute a NaN or stop halfway.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from msgspec.structs import replace
from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, GivenUp, Go
from paceline.core.rank import rounds, script, streaming
from paceline.core.rank.state import RankState
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode, Overlap

from testing.simulation.faults import Fault, Kind
from testing.simulation.histories import run
from testing.simulation.ranks import SimRank
from testing.simulation.simulation import BrokenPromiseError, Simulation
from testing.simulation.world import MS, World

SEEDS = 20
"""Number of histories within which a switched-off rule must break an invariant."""
CLEAN = World(replicas=3, segments=4, leases=40, until_ms=8_000)
HARD = RoundSettings(mode=Mode.QUORUM, quorum=2, bench_after_ns=300 * MS)


def records(sim: Simulation) -> list[Go]:
    history = sim.checkers.history(sim.finished[0].state.log.digest)
    return [r for r in history if isinstance(r, Go)]


def troubled(seed: int) -> tuple[World, list[Fault]]:
    """Build a job whose rounds start too optimistically again and again."""
    draw = random.Random(seed)
    world = World(
        replicas=draw.choice([2, 3, 5]),
        segments=draw.choice([2, 4]),
        leases=60,
        settings=replace(HARD, mode=draw.choice([Mode.FULL, Mode.QUORUM, Mode.MAJORITY])),
        discard=draw.choice([0.0, 0.3]),
        rewrite=draw.choice([0.0, 0.2]),
        nan=draw.choice([0.0, 0.2]),
        until_ms=8_000,
    )
    kinds = [Kind.HANG, Kind.HANG, Kind.KILL, Kind.DRAIN, Kind.CRASH]
    faults = [Fault(draw.uniform(50, 400), draw.choice(kinds), 150, seed) for _ in range(3)]
    return world, faults


# ---- with all rules ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.QUORUM])
def test_most_rounds_are_streamed_if_no_rank_is_slow(mode: Mode) -> None:
    sim = run(World(replicas=3, segments=4, leases=90, settings=replace(HARD, mode=mode)), 1, [])
    streamed = [go.streamed for go in records(sim)]
    assert sum(streamed) >= (0.9 if mode is Mode.FULL else 0.6) * len(streamed)
    assert not any(go.void for go in records(sim))


def test_overlap_never_disables_streamed_rounds() -> None:
    world = World(replicas=3, segments=4, settings=RoundSettings(overlap=Overlap.NEVER))
    assert not any(go.streamed for go in records(run(world, 1, [])))


def test_the_last_round_is_not_streamed_and_metrics_are_complete() -> None:
    sim = run(CLEAN, 1, [])
    assert not records(sim)[-1].streamed
    log = sim.finished[0].state.log
    assert log.ledger.metrics["loss"][1] == log.ledger.total().applied


def test_streamed_and_plain_jobs_apply_the_same_samples() -> None:
    ends = []
    for overlap in Overlap:
        world = World(replicas=3, segments=4, leases=60, settings=RoundSettings(overlap=overlap))
        ends.append(run(world, 3, []).finished[0].state.log.ledger.total().applied)
    assert ends[0] == ends[1]


@pytest.mark.long
def test_the_invariants_hold_in_jobs_with_faults_and_aborted_rounds() -> None:
    void = streamed = 0
    for seed in range(SEEDS):
        world, faults = troubled(seed)
        sim = run(world, seed, faults)
        assert sim.finished, sim.story()
        void += sum(sim.checkers.is_void.values())
        streamed += sum(go.streamed for go in records(sim))
    assert void > SEEDS
    assert streamed > SEEDS


def test_backoff_doubles_after_each_aborted_round() -> None:
    rank = RankState(me=None, pid=0, host="", endpoints=None)  # type: ignore[arg-type]
    waits = []
    for own in [None, GivenUp.LATE] * 4:
        streaming.voided(rank, own)
        waits.append(rank.stream.quiet)
    assert waits == [2, 4, 8, 16, 32, 64, 64, 64]
    assert rank.stream.given_up == {GivenUp.LATE: 4}


def rounds_with_somebody_late() -> list[Go]:
    """Return the rounds of a job in which some rank often stops for three steps in backward()."""
    settings = RoundSettings(mode=Mode.QUORUM, quorum=3)
    world = World(
        replicas=4, settings=settings, segments=8, leases=1000, step_ms=(95, 105), late=0.25
    )
    return records(run(dataclasses.replace(world, until_ms=400_000), 1, []))


def voids(history: list[Go]) -> int:
    return sum(go.void for go in history)


@pytest.mark.long
def test_few_rounds_are_aborted_if_some_rank_is_late_in_most_rounds() -> None:
    history = rounds_with_somebody_late()
    assert 2 <= voids(history[:50]) <= 10, "all learn it soon"
    assert voids(history[50:]) <= len(history[50:]) / 20
    assert sum(go.streamed for go in history) <= len(history) / 8


# ---- each rule, and what breaks without it -------------------------------------------------------


def breaks(world: World, *faults: Fault) -> bool:
    """Return True if any history of such a job violates an invariant."""
    for seed in range(SEEDS):
        try:
            run(world, seed, list(faults))
        except (BrokenPromiseError, AssertionError, KeyError):
            return True
    return False


def never(*_: object, **__: object) -> bool:
    """Return False: replaces a rule that is switched off."""
    return False


HOPES = streaming.hopes
VOIDED = streaming.voided
HEAR = Arrivals.hear
APPEND = Log._append_go
POST = SimRank.post


@pytest.mark.long
def test_r28_announcing_a_batch_of_old_weights_early_breaks_invariants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hopes_for_any(rank: RankState) -> bool:
        before, rank.main_version = rank.main_version, rank.log.version
        hope = HOPES(rank)
        rank.main_version = before
        return hope

    world = dataclasses.replace(CLEAN, settings=replace(HARD, quorum=1), slow={0: 3.0})
    assert not breaks(world)
    monkeypatch.setattr(streaming, "hopes", hopes_for_any)
    assert breaks(world)


@pytest.mark.long
def test_r28_using_a_batch_number_twice_breaks_invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    def uses_it_again(rank: RankState, *_: object, **__: object) -> None:
        rank.stream.coming = None

    world = dataclasses.replace(CLEAN, leases=0, misjudge=0.3)
    assert not breaks(world)
    monkeypatch.setattr(script, "_drop_coming", uses_it_again)
    assert breaks(world)


def test_r30_a_rank_that_blocks_inside_a_streamed_round_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waits(self: SimRank, event: Any) -> None:
        inside = self.stream is not None
        if inside and type(event).__name__ in ("Step", "Prepare", "Skip", "Tick"):
            self.waiting.append(event)
        else:
            POST(self, event)

    assert len(run(CLEAN, 1, []).ranks) == 3
    monkeypatch.setattr(SimRank, "post", waits)
    assert len(run(CLEAN, 1, []).ranks) > 3


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["discard", "rewrite", "nan"])
def test_r31_without_flags_a_gradient_unlike_its_announcement_breaks_invariants(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = dataclasses.replace(CLEAN, **dict[str, Any]({trouble: 0.3}))
    assert not breaks(world)
    monkeypatch.setattr(SimRank, "_flags", never)
    # A rewritten gradient leaves no trace in sums of labels. `tests/worker/test_reduction.py`
    # shows that it ends the round.
    assert breaks(world) or trouble == "rewrite"


@pytest.mark.long
def test_r32_an_aborted_round_makes_no_gradient_late(monkeypatch: pytest.MonkeyPatch) -> None:
    world = dataclasses.replace(CLEAN, rewrite=0.5)

    def late() -> int:
        return sum(
            run(world, seed, []).finished[0].state.log.ledger.total().late for seed in range(5)
        )

    assert late() == 0
    monkeypatch.setattr(rounds, "_lift", never)
    assert late() > 0


@pytest.mark.long
def test_r32_no_rank_announces_early_in_the_round_after_an_aborted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks know it from the log, which a joiner has as well.

    The backoff would hide the effect, so it is switched off here.
    """

    def forgets(log: Log, go: Go) -> None:
        APPEND(log, go)
        log.after_void = False

    def tries_at_once(rank: RankState, own: GivenUp | None) -> None:
        VOIDED(rank, own)
        rank.stream.level = rank.stream.quiet = 0

    def said_after_void() -> int:
        count = 0
        for seed in range(SEEDS):
            sim = run(dataclasses.replace(CLEAN, replicas=5, discard=0.5), seed, [])
            void = {key for key, is_void in sim.checkers.is_void.items() if is_void}
            count += sum(
                coming and (generation, round_ - 1) in void
                for generation, round_, _, coming in sim.checkers.words
            )
        return count

    monkeypatch.setattr(streaming, "voided", tries_at_once)
    assert said_after_void() == 0
    monkeypatch.setattr(Log, "_append_go", forgets)
    assert said_after_void() > 0


@pytest.mark.long
def test_r33_without_a_patience_limit_a_hang_in_backward_breaks_invariants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The script stops forever inside backward(), after COMING."""
    world = dataclasses.replace(CLEAN, settings=HARD)
    hang = [Fault(at_ms, Kind.HANG, 10**7, 1) for at_ms in (153.0, 157.0, 161.0)]
    assert not breaks(world, *hang)
    monkeypatch.setattr(streaming, "consider_giving_up", never)
    assert breaks(world, *hang)


@pytest.mark.long
def test_r33_more_rounds_abort_if_only_the_rank_that_gave_up_backs_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only_its_own(rank: RankState, own: GivenUp | None) -> None:
        s = rank.stream
        before = s.level, s.quiet, s.good
        VOIDED(rank, own)
        if own is None:
            s.level, s.quiet, s.good = before

    monkeypatch.setattr(streaming, "voided", only_its_own)
    history = rounds_with_somebody_late()
    assert voids(history[50:]) > len(history[50:]) / 20


@pytest.mark.long
def test_r33_no_round_aborts_if_patience_is_learned_from_whole_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each whole round includes some rank's lateness, so with that length no rank gives up."""
    ended = streaming.ended

    def takes_the_round(rank: RankState, go: Go, *, transfer_ns: int) -> None:
        if go.streamed and rank.stream.batches_ns:
            rank.stream.batches_ns[-1] = max(rank.stream.batches_ns[-1], 400 * MS)
        ended(rank, go, transfer_ns=transfer_ns)

    monkeypatch.setattr(streaming, "ended", takes_the_round)
    history = rounds_with_somebody_late()
    assert voids(history[:50]) == 0


@pytest.mark.long
def test_r34_treating_coming_as_arrive_breaks_invariants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def takes_it_for_arrive(self: Arrivals, kind: AnnounceKind, *rest: Any) -> None:
        arrive = AnnounceKind.ARRIVE if kind is AnnounceKind.COMING else kind
        HEAR(self, arrive, *rest)

    assert not breaks(CLEAN)
    monkeypatch.setattr(Arrivals, "hear", takes_it_for_arrive)
    assert breaks(CLEAN)
