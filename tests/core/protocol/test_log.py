"""The round log: leases exactly once, equal logs give equal facts, weights, long counts."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.messages import Commit, Endpoints, Prepare
from paceline.core.protocol.composition import compact
from paceline.core.protocol.deal import Deal, DealError
from paceline.core.protocol.log import AGES_MAX, Log, LogError
from paceline.core.protocol.pending import Pending
from paceline.core.protocol.progress import progress_of
from paceline.core.protocol.records import (
    AnnounceKind,
    Benched,
    DataPlan,
    Drop,
    DropReason,
    Gen,
    Go,
    Request,
    Share,
    Trigger,
)
from paceline.core.protocol.sampling import samples_of, total_leases
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode, Normalisation, Pacing

from testing.examples import examples
from testing.makers import GEN_1, PLAN, fresh, go, idle, make_log, member, members

CI = settings(max_examples=examples(80), derandomize=True, deadline=None, database=None)


# ---- leases, exactly once ------------------------------------------------------------------------


def all_leases(log: Log, gone: set[int]) -> list[int]:
    """Return every lease at each place where it is, so duplicates show."""
    held = [x for _, leases in log.deal.all_held() for x in leases]
    return sorted([*gone, *held, *log.deal.pool, *range(log.deal.next, total_leases(log.plan))])


@pytest.mark.long
@CI
@given(st.data())
def test_a_lease_is_in_exactly_one_place(data: st.DataObject) -> None:
    """The history has random rounds, drops, returns, benches, joins and departures."""
    plan = DataPlan(samples=118, batch=4, epochs=2, seed=1)
    log = make_log(3, RoundSettings(mode=Mode.SOLO), plan)
    gone: set[int] = set()
    seqs = dict.fromkeys(members(0, 1, 2, 3), 0)
    while not log.stopped and log.index < 120:
        kind = data.draw(st.sampled_from(["round"] * 4 + ["bench", "join", "leave"]))
        if kind == "round":
            record: Go | Gen = _draw_round(data, log, seqs, gone)
        elif kind == "bench" and len(log.active) > 1:
            victim = log.active[-1]
            record = go(log, benched=(Benched(victim, log.held(victim)),), trigger=Trigger.BENCH)
        else:
            others = [m for m in members(0, 1, 2, 3) if m not in log.members]
            stay = log.members + tuple(others[:1]) if kind == "join" else log.members[1:]
            if not stay:
                continue
            stay = tuple(sorted(stay))
            counter = log.id.counter + 1
            record = Gen(GenerationId(1, "a", counter), stay, stay, stay, log.version)
        log.append(record)
        assert all_leases(log, gone) == list(range(total_leases(plan)))
    total = log.ledger.total()
    assert total.applied + total.dropped == sum(samples_of(plan, x) for x in gone)


def _draw_round(data: st.DataObject, log: Log, seqs: dict[MemberId, int], gone: set[int]) -> Go:
    shares = []
    for who in log.active:
        held = log.held(who)
        take = data.draw(st.integers(0, len(held)))
        drop = data.draw(st.booleans())
        mine, rest = held[:take], held[take:]
        drops: tuple[Drop, ...] = ()
        if drop and rest:
            drops = (Drop(DropReason.SKIPPED, samples_of(log.plan, rest[0]), rest[:1]),)
        back = rest[len(drops) :] if data.draw(st.booleans()) else ()
        seqs[who] += len(mine)
        share = Share(
            who,
            upto=seqs[who],
            count=len(mine),
            oldest=log.version,
            samples=sum(samples_of(log.plan, x) for x in mine),
            unit=4,
            leases=mine,
            drops=drops,
            returned=back,
        )
        gone.update(mine, *(d.leases for d in drops))
        shares.append(share)
    return go(log, *shares, trigger=Trigger.TAIL)


def test_a_rank_cannot_apply_a_lease_that_it_does_not_hold() -> None:
    log = make_log(2)
    stolen = replace(fresh(log, 0), leases=log.held(member(1))[:1])
    with pytest.raises(DealError, match="is not held by"):
        log.append(go(log, stolen))


def test_leases_are_dealt_round_robin_and_returned_ones_first() -> None:
    deal = Deal()
    everybody = members(0, 1, 2)
    deal.enlist(everybody)
    deal.refill(PLAN, {m: place for place, m in enumerate(everybody)})
    assert deal.all_held() == tuple(zip(everybody, ((0, 3), (1, 4), (2, 5)), strict=True))
    deal.take_back(member(1))
    deal.enlist(members(0, 2, 3))
    deal.refill(PLAN, {m: place for place, m in enumerate(members(0, 2, 3))})
    assert deal.held_by(member(3)) == (1, 4)
    assert deal.next == 6
    assert not deal.short, "who holds enough, or has departed, is not looked at again"


# ---- records that do not fit ---------------------------------------------------------------------


def test_a_record_that_does_not_fit_is_rejected_with_the_reason() -> None:
    log = make_log(2)
    with pytest.raises(LogError, match="GO of round 3"):
        log.append(replace(go(log, fresh(log, 0)), round=3))
    with pytest.raises(LogError, match="not active"):
        log.append(go(log, idle(7)))
    with pytest.raises(LogError, match="last active"):
        log.append(go(log, benched=tuple(Benched(m, log.held(m)) for m in log.active)))
    log = make_log(2)
    log.append(go(log, fresh(log, 0), fresh(log, 1), request=Request(2, None)))
    with pytest.raises(LogError, match="request 2 written after 2"):
        log.append(go(log, fresh(log, 0), request=Request(2, None)))


def test_no_record_follows_the_stop_round() -> None:
    log = make_log(2)
    log.append(go(log, request=Request(1, stop=True)))
    assert log.stopped
    with pytest.raises(LogError, match="after the stop round"):
        log.append(go(log))


# ---- a function of the records alone -------------------------------------------------------------


@CI
@given(st.data(), st.sampled_from(Normalisation), st.sampled_from([Pacing.ROUND, Pacing.SAMPLES]))
def test_a_restored_log_continues_as_the_original(
    data: st.DataObject, normalisation: Normalisation, pacing: Pacing
) -> None:
    rules = RoundSettings(mode=Mode.SOLO, normalisation=normalisation, pacing=pacing)
    log = make_log(3, rules)
    cut = data.draw(st.integers(0, 10))
    twin: Log | None = None
    for seq in range(1, 14):
        if seq == cut:
            twin = Log.restore(log.snapshot())
        who = data.draw(st.sets(st.integers(0, 2), min_size=1))
        record = go(log, *(fresh(log, slot, seq) for slot in sorted(who)))
        if twin is not None:
            assert twin.weigh(record) == log.weigh(record)
            twin.append(record)
        log.append(record)
    if twin is not None:
        assert twin.snapshot() == log.snapshot()


def test_missing_after_returns_the_records_that_a_member_lacks() -> None:
    log = make_log(2)
    end = log.index, log.digest
    log.append(Gen(GenerationId(1, "a", 2), log.members, log.members, log.members, 0))
    log.append(go(log, fresh(log, 0), fresh(log, 1)))
    assert len(log.missing_after(*end)) == 2
    with pytest.raises(LogError, match="not a prefix"):
        log.missing_after(end[0], "another")
    log.append(go(log, fresh(log, 0, 2), fresh(log, 1, 2)))
    with pytest.raises(LogError, match="not a prefix"):
        log.missing_after(*end)


# ---- weights (I10-I12) ---------------------------------------------------------------------------


def update(log: Log, record: Go, sums: dict[int, Fraction]) -> Fraction:
    """Return the optimizer's gradient if slot s contributes `sums[s]`, its sum of gradients."""
    w = log.weigh(record)
    reduced = sum(
        (sums[s.member.slot] / s.unit * Fraction(w.factor(s)) for s in record.listed if s.count),
        Fraction(0),
    )
    return reduced / Fraction(w.divisor)


contributions = st.lists(
    st.tuples(st.integers(1, 9), st.fractions(-100, 100, max_denominator=50)),
    min_size=2,
    max_size=5,
)


@CI
@given(contributions, st.sampled_from(Normalisation), st.randoms())
def test_an_update_is_linear_and_independent_of_the_order(
    parts: list[tuple[int, Fraction]], normalisation: Normalisation, dice: Random
) -> None:
    """The update is the sum over samples over the divisor, for all units and orders (I11, I12)."""
    log = make_log(len(parts), RoundSettings(mode=Mode.SOLO, normalisation=normalisation))
    shares = [replace(fresh(log, slot), samples=n, unit=n) for slot, (n, _) in enumerate(parts)]
    sums = {slot: total for slot, (_, total) in enumerate(parts)}
    record = go(log, *shares)
    samples = sum(n for n, _ in parts)
    divisor = {
        Normalisation.FIXED: 4 * len(parts),
        Normalisation.APPLIED: samples,
        Normalisation.CONTRIBUTORS: 4 * len(parts),
    }[normalisation]
    wanted = sum(sums.values(), Fraction(0)) / divisor
    assert abs(update(log, record, sums) - wanted) < Fraction(1, 10**9)
    dice.shuffle(shares)
    assert update(log, go(log, *shares), sums) == update(log, record, sums)
    twice = {slot: 2 * total for slot, total in sums.items()}
    assert update(log, record, twice) == 2 * update(log, record, sums)


def test_equal_sample_counts_use_the_mean_of_means() -> None:
    """The bits are those of the plain reference: no multiplication before the sum (D3)."""
    log = make_log(3)
    equal = go(log, *(fresh(log, slot) for slot in range(3)))
    assert log.weigh(equal).equal
    assert log.weigh(equal).divisor == 3
    uneven = go(log, fresh(log, 0), replace(fresh(log, 1), samples=3, unit=3))
    assert not log.weigh(uneven).equal


def test_with_sample_pacing_the_optimizer_steps_once_per_nominal_samples() -> None:
    log = make_log(4, RoundSettings(mode=Mode.SOLO, pacing=Pacing.SAMPLES))
    steps = []
    for seq in range(1, 9):
        record = go(log, fresh(log, 0, seq))
        steps.append(log.weigh(record).step)
        log.append(record)
    assert steps == [False, False, False, True] * 2
    assert (log.updates, log.accumulated) == (2, 0)


@CI
@given(st.sampled_from(list(Mode)), st.integers(2, 9), st.integers(1, 9), st.data())
def test_every_mode_makes_about_as_many_optimizer_steps_per_sample_as_full(
    mode: Mode, ranks: int, quorum: int, data: st.DataObject
) -> None:
    """Each step is the mean of two to four thirds of a full round's samples if rounds are alike.

    In any case it has at most those of two full rounds. Eight ranks with a quorum of seven once
    made half of the steps, each of 14 or 15 contributions.
    """
    rules = RoundSettings(mode=mode, quorum=quorum, pacing=Pacing.SAMPLES, max_age=0)
    plan = DataPlan(samples=4 * 9 * 1000, batch=4, epochs=1, seed=1)
    log = make_log(ranks, rules, plan)
    log.append(go(log, *(fresh(log, slot) for slot in range(ranks))))
    alike = data.draw(st.booleans())
    sizes = st.integers(log.quorum, ranks)
    sizes = st.just(data.draw(sizes)) if alike else sizes
    nominal, applied = 4 * ranks, 0
    for _ in range(40):
        shares = [fresh(log, slot, log.version + 1) for slot in range(data.draw(sizes))]
        record = go(log, *shares)
        weighing = log.weigh(record)
        applied += weighing.samples
        log.append(record)
        if weighing.step:
            most = Fraction(4, 3) if alike else 2
            assert Fraction(2, 3) * nominal <= applied <= most * nominal
            assert weighing.divisor * weighing.unit == applied
            applied = 0
    assert log.progress / 2 - 1 <= log.updates <= log.progress * Fraction(3, 2)


def test_a_quorum_of_seven_of_eight_steps_in_each_round() -> None:
    log = make_log(8, RoundSettings(mode=Mode.QUORUM, quorum=7, pacing=Pacing.SAMPLES))
    for seq in range(1, 9):
        record = go(log, *(fresh(log, slot, seq) for slot in range(8 if seq == 1 else 7)))
        assert log.weigh(record).step
        assert log.weigh(record).divisor == (8 if seq == 1 else 7)
        log.append(record)
    assert log.updates == 8


def test_age_counts_weight_updates_not_rounds() -> None:
    """Three of four rounds of mode Solo change no weights, so a gradient does not age by them.

    An aborted round does not count either, and a copy of the log has the same ages.
    """
    log = make_log(4, RoundSettings(mode=Mode.SOLO, pacing=Pacing.SAMPLES))
    for seq in range(1, 13):
        log.append(go(log, fresh(log, 0, seq)))
    assert (log.version, log.updates) == (12, 3)
    assert [log.age(version) for version in range(13)] == [3] * 4 + [2] * 4 + [1] * 4 + [0]
    log.append(go(log).voided())
    assert [log.age(version) for version in range(14)] == [3] * 5 + [2] * 4 + [1] * 4 + [0]
    copy = Log.restore(log.snapshot())
    assert [copy.age(version) for version in range(14)] == [log.age(v) for v in range(14)]


def test_if_each_round_steps_an_age_is_its_number_of_rounds() -> None:
    log = make_log(1, RoundSettings(mode=Mode.SOLO), DataPlan())
    for seq in range(1, AGES_MAX + 50):
        log.append(go(log, Share(member(0), upto=seq, count=1, fresh=True, samples=1, unit=1)))
    assert [log.age(v) for v in (0, 1, 40, 60, AGES_MAX)] == [
        log.version - v for v in (0, 1, 40, 60, AGES_MAX)
    ]


def test_a_gradient_that_missed_rounds_without_an_update_is_not_dropped() -> None:
    """With maxAge 1 in mode Solo, a rank three times slower once contributed nothing."""
    rules = RoundSettings(mode=Mode.SOLO, pacing=Pacing.SAMPLES, max_age=1)
    log = make_log(4, rules, DataPlan())
    log.append(go(log, *(Share(member(s), 1, 1, fresh=True, samples=1, unit=1) for s in range(4))))
    pending = Pending()
    pending.add(version=log.version, leases=(), samples=1, unit=1, metrics=())
    for seq in range(2, 5):
        log.append(go(log, Share(member(0), seq, 1, fresh=True, samples=1, unit=1)))
    kept, _ = pending.share(
        member(1),
        round_=log.version,
        age=log.age,
        settings=rules,
        with_grad=True,
        fresh=False,
        holds=lambda _: True,
    )
    assert (kept.count, kept.drops) == (1, ())


def ddp_mean(sums: dict[int, Fraction], samples: dict[int, int]) -> Fraction:
    """Return the update of DistributedDataParallel: the mean over the ranks of each rank's mean."""
    return sum((sums[r] / samples[r] for r in sums), Fraction(0)) / len(sums)


@pytest.mark.parametrize("rules", [
    RoundSettings(),
    RoundSettings(mode=Mode.SHADOW),
    RoundSettings(mode=Mode.QUORUM, quorum=3),
    RoundSettings(mode=Mode.QUORUM, quorum=3, pacing=Pacing.SAMPLES),
])  # fmt: skip
def test_the_update_of_a_synchronous_round_is_the_mean_of_its_samples(rules: RoundSettings) -> None:
    """The update has the bits of DDP if all ranks have batches of one size.

    This includes short batches at the end of an epoch, which were once divided by the samples of
    full batches. If sizes differ, each sample weighs the same here, but each rank's mean does in
    DDP.
    """
    sums = {slot: Fraction(7**slot, 3) for slot in range(3)}
    for sizes in ((4, 4, 4), (2, 2, 2), (4, 4, 1)):
        log = make_log(3, rules)
        shares = [replace(fresh(log, s), samples=n, unit=n) for s, n in enumerate(sizes)]
        record = go(log, *shares)
        assert log.weigh(record).step
        mean = sum(sums.values(), Fraction(0)) / sum(sizes)
        assert abs(update(log, record, sums) - mean) < Fraction(1, 10**12)
        by_ddp = ddp_mean(sums, dict(enumerate(sizes)))
        assert (mean == by_ddp) is (len(set(sizes)) == 1)
        if mean == by_ddp:
            assert (log.weigh(record).equal, log.weigh(record).divisor) == (True, 3.0)


def test_scheduler_steps_equal_applied_over_nominal_samples() -> None:
    log = make_log(4, RoundSettings(mode=Mode.SOLO))
    ticks = []
    for seq in range(1, 9):
        record = go(log, fresh(log, 0, seq))
        ticks.append(log.weigh(record).scheduler_steps)
        log.append(record)
    assert sum(ticks) == 2


def test_accumulated_gradients_are_applied_with_the_last_round() -> None:
    log = make_log(2, RoundSettings(mode=Mode.SOLO, pacing=Pacing.SAMPLES), DataPlan())
    one = Share(member(0), upto=1, count=1, fresh=True, samples=1, unit=1)
    log.append(go(log, one))
    assert log.accumulated
    done = [idle(s, resting=True, done=True) for s in range(2)]
    assert log.weigh(go(log, *done)).step
    log.append(go(log, *done))
    assert log.stopped
    assert not log.accumulated


def test_the_log_counts_the_steps_of_a_self_fed_script() -> None:
    """Each rank's step counts as one over the number of active ranks.

    A dropped step counts too.
    """
    log = make_log(2, RoundSettings(mode=Mode.SOLO), DataPlan(steps=2))
    one = Share(member(0), upto=1, count=1, fresh=True, samples=1, unit=1)
    dropped = replace(one, count=0, samples=0, drops=(Drop(DropReason.NONFINITE, 1),))
    counted = []
    for share in (one, dropped, one, one):
        assert not log.stopped
        last = go(log, share)
        assert log.stops_with(last) == (log.steps == Fraction(3, 2))
        log.append(last)
        counted.append((log.steps, progress_of(log).step))
    assert counted == [(Fraction(n, 2), n // 2) for n in (1, 2, 3, 4)]
    assert log.stopped
    assert log.is_worked_off
    assert Log.restore(log.snapshot()).snapshot() == log.snapshot()


@pytest.mark.parametrize("plan", [PLAN, DataPlan(), DataPlan(steps=100)])
def test_the_script_of_one_rank_can_stop_the_job(plan: DataPlan) -> None:
    log = make_log(3, plan=plan)
    last = go(log, idle(2, stop=True), idle(1, stop=True, resting=True))
    assert log.stops_with(last)
    log.append(last)
    assert log.stopped
    assert log.is_worked_off, "unlike a stop that is asked for from outside"
    assert log.publisher == log.stopped_by == member(1)
    copy = Log.restore(log.snapshot())
    assert (copy.stopped, copy.publisher) == (True, member(1))
    others = members(0, 2)
    log.append(Gen(GenerationId(1, "a", 2), others, others, others, log.version))
    assert log.stopped
    assert log.publisher == member(0), "if the one that ended it is gone"


@pytest.mark.parametrize("normalisation", Normalisation)
@pytest.mark.parametrize("pacing", [Pacing.ROUND, Pacing.SAMPLES])
def test_samples_per_step_of_a_self_fed_script_do_not_change_its_weight(
    normalisation: Normalisation, pacing: Pacing
) -> None:
    """`step(samples=16)` once weighed 16 times as much, and the scheduler ran 16 times as fast."""
    settings = RoundSettings(mode=Mode.SOLO, normalisation=normalisation, pacing=pacing)
    log = make_log(2, settings, DataPlan(steps=9))
    both = [Share(member(s), 1, count=1, fresh=True, samples=16, unit=16) for s in range(2)]
    weighing = log.weigh(go(log, *both))
    assert (weighing.divisor, weighing.step, weighing.scheduler_steps) == (2.0, True, 1)
    log.append(go(log, both[0]))
    last = go(log, both[1])
    weighing = log.weigh(last)
    assert weighing.scheduler_steps == 1
    if pacing is Pacing.SAMPLES:
        assert (weighing.step, weighing.divisor, weighing.unit) == (True, 32.0, 1)
    log.append(last)
    assert (log.progress, log.accumulated, log.accumulated_steps) == (Fraction(1), 0, 0)


def test_ended_loops_do_not_end_a_job_with_steps_left() -> None:
    log = make_log(2, plan=DataPlan(steps=2))
    log.append(go(log, *(idle(s, resting=True, done=True) for s in range(2))))
    assert not log.stopped


def test_a_generation_never_ends_a_self_fed_job() -> None:
    """Accumulated gradients need a round.

    Only a round in which all ranks are done ends the job.
    """
    log = make_log(2, plan=DataPlan())
    log.append(go(log, idle(0, resting=True, done=True), idle(1)))
    log.append(Gen(GenerationId(1, "a", 2), members(0), members(0), members(0), 1))
    assert not log.stopped
    log.append(go(log, idle(0, resting=True, done=True)))
    assert log.stopped


# ---- I18 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("begins", [2**16 - 400, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_counters_run_past_2_to_the_16(begins: int) -> None:
    """One rank runs machine, log, ledger and scheduler on the fast path past 65,536 rounds."""
    rank = Rank(member(0), pid=1, host="h", endpoints=Endpoints("t", "d"))
    rounds = 2**16 + 500 - begins
    plan = DataPlan(samples=rounds, batch=1, epochs=1, seed=1)
    held: tuple[int, ...] = ()
    follow = _first_generation(member(0), plan, begins)
    now = applied = 0
    while follow:
        now += 10**6
        effects = rank.handle(now, follow.pop())
        for effect in effects:
            match effect:
                case ev.Held(leases=leases):
                    held = leases
                case ev.Resume(stopped=False):
                    follow.append(ev.Step(held[:1], 1, 1) if held else ev.Want())
                case ev.Reduce():
                    follow.append(ev.Reduced())
                case ev.Apply():
                    applied += 1
                case _:
                    pass
    log = rank.state.log
    assert applied == log.updates == rounds
    assert log.version == begins + rounds
    assert log.stopped
    assert log.ledger.total().applied == rank.state.pending.produced == rounds
    assert log.progress == rounds
    assert len(log.recent) <= 2
    assert Log.restore(log.snapshot()).digest == log.digest


def _first_generation(me: MemberId, plan: DataPlan, version: int) -> list[ev.Event]:
    """Return the events that start a job with this rank alone, the last one first."""
    alone, both = (me,), {"plan": plan, "settings": RoundSettings()}
    gen = Gen(GEN_1, alone, alone, alone, version, lookahead=((me, 2),), **both)  # type: ignore[arg-type]
    commit = Commit(gen, me, (), me, (), ((me, Endpoints("t", "d")),))
    return [ev.ChannelOpened(), commit, Prepare(GEN_1), ev.Begin("same", plan, 2)]


# ---- arrivals that are remembered ----------------------------------------------------------------


def test_remembered_arrivals_cover_all_ranks_and_several_rounds() -> None:
    """The automatic deadline is derived from these arrivals.

    If only the last 128 ranks in rank order were kept, it would depend on those alone.
    """
    ranks = 256
    log = make_log(ranks, RoundSettings(mode=Mode.DEADLINE), DataPlan())
    for round_ in range(40):
        came = {m: (AnnounceKind.ARRIVE, ranks * (round_ % 16) + m.slot) for m in log.active}
        log.append(compact(log, go(log), came))
    kept = [divmod(us, ranks) for us in log.offsets_us]
    assert {round_ for round_, _ in kept} == set(range(8)), "the last eight"
    slots = sorted(slot for _, slot in kept)
    assert len(set(slots)) > 100, "others in each round"
    assert [sum(low <= x < low + 64 for x in slots) for low in range(0, ranks, 64)] == [32] * 4
