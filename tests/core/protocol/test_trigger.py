"""The trigger that starts a round in each mode: tables, and cases of bench, grace and deadline."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from paceline.core.protocol.arrivals import Arrival, bench_after_ns
from paceline.core.protocol.records import AnnounceKind, DataPlan, Share, Trigger
from paceline.core.protocol.trigger import decide, initiator
from paceline.core.protocol.waits import deadline_ns, grace_ns
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy, Mode

from testing.makers import arrivals, fresh, go, idle, make_log, member, table

MS = 10**6
QUORUM_2 = RoundSettings(mode=Mode.QUORUM, quorum=2, grace_ns=0, bench_after_ns=100 * MS)


def after_first_round(settings: RoundSettings, ranks: int = 4) -> Any:
    """Build a log after its first round, which is Full in every mode."""
    log = make_log(ranks, settings)
    log.append(go(log, *(fresh(log, slot) for slot in range(ranks))))
    return log


def ask(log: Any, now_ns: int = 10 * MS, has_request: bool = False, **words: Any) -> Any:
    return decide(table(log, arrivals(log, **words)), now_ns=now_ns, has_request=has_request)


ARRIVE, PENDING, IDLE = ("arrive", 1 * MS), ("pending", 1 * MS), ("idle", 1 * MS)


@pytest.mark.parametrize(
    ("mode", "words", "trigger"),
    [
        (Mode.FULL, {"r0": ARRIVE, "r1": ARRIVE, "r2": ARRIVE}, None),
        (Mode.FULL, {"r0": ARRIVE, "r1": ARRIVE, "r2": ARRIVE, "r3": ARRIVE}, Trigger.ALL),
        (Mode.FULL, {"r0": ARRIVE, "r1": ARRIVE, "r2": ARRIVE, "r3": PENDING}, None),
        (Mode.FULL, {"r0": ARRIVE, "r1": IDLE, "r2": ARRIVE, "r3": IDLE}, Trigger.TAIL),
        (Mode.SHADOW, {"r0": ARRIVE, "r1": ARRIVE, "r2": ARRIVE}, None),
        (Mode.QUORUM, {"r0": ARRIVE}, None),
        (Mode.QUORUM, {"r0": ARRIVE, "r1": PENDING}, None),
        (Mode.QUORUM, {"r0": ARRIVE, "r3": ARRIVE}, Trigger.QUORUM),
        (Mode.QUORUM, {"r0": ARRIVE, "r1": IDLE, "r2": IDLE, "r3": IDLE}, Trigger.TAIL),
        (Mode.QUORUM, {"r0": IDLE, "r1": IDLE, "r2": IDLE, "r3": IDLE}, None),
        (Mode.SOLO, {}, None),
        (Mode.SOLO, {"r2": PENDING}, None),
        (Mode.SOLO, {"r2": ARRIVE}, Trigger.QUORUM),
        (Mode.MAJORITY, {"r0": ARRIVE, "r1": ARRIVE}, None),
        (Mode.MAJORITY, {"r0": ARRIVE, "r1": ARRIVE, "r3": ARRIVE}, Trigger.QUORUM),
        (Mode.DEADLINE, {"r0": ARRIVE, "r1": ARRIVE}, None),
    ],
)
def test_each_mode_starts_a_round_under_its_condition(
    mode: Mode, words: dict[str, Any], trigger: Trigger | None
) -> None:
    log = after_first_round(replace(QUORUM_2, mode=mode, deadline_ns=50 * MS))
    assert ask(log, **words).trigger is trigger


@pytest.mark.parametrize("mode", Mode)
def test_the_first_the_warmup_and_every_nth_round_are_full(mode: Mode) -> None:
    settings = replace(QUORUM_2, mode=mode, warmup_rounds=2, full_every=3)
    log = make_log(3, settings)
    needs = []
    for seq in range(1, 7):
        needs.append(log.quorum)
        log.append(go(log, *(fresh(log, slot, seq) for slot in range(3))))
    partial = {Mode.FULL: 3, Mode.SHADOW: 3, Mode.SOLO: 1}.get(mode, 2)
    assert needs == [3, 3, partial, 3, partial, partial]


@pytest.mark.parametrize(
    ("quorum", "percent", "active", "k"),
    [(2, 0, 4, 2), (9, 0, 4, 4), (0, 50, 5, 3), (0, 1, 4, 1), (0, 0, 4, 4), (0, 100, 3, 3)],
)
def test_the_quorum_is_a_number_or_a_percentage_rounded_up(
    quorum: int, percent: int, active: int, k: int
) -> None:
    settings = RoundSettings(mode=Mode.QUORUM, quorum=quorum, quorum_percent=percent)
    assert after_first_round(settings, active).quorum == k


def test_the_grace_time_waits_for_ranks_that_are_almost_done() -> None:
    log = after_first_round(replace(QUORUM_2, grace_ns=5 * MS))
    words: dict[str, Any] = {"r0": ("arrive", 1 * MS), "r1": ("arrive", 4 * MS)}
    early = ask(log, now_ns=8 * MS, **words)
    assert (early.trigger, early.wake_ns) == (None, 9 * MS)
    assert ask(log, now_ns=9 * MS, **words).trigger is Trigger.QUORUM
    everybody: dict[str, Any] = {**words, "r2": ("arrive", 5 * MS), "r3": ("arrive", 5 * MS)}
    assert ask(log, now_ns=5 * MS, **everybody).trigger is Trigger.ALL


def test_the_grace_time_waits_only_for_ranks_that_began_with_the_others() -> None:
    """A permanently slower rank must not cost the others the grace time, 5 % of each round."""
    log = after_first_round(replace(QUORUM_2, grace_ns=5 * MS), ranks=3)

    def starts(**words: Any) -> Trigger | None:
        both: dict[str, Any] = {"r0": ("arrive", 30 * MS), "r1": ("arrive", 31 * MS)}
        trigger: Trigger | None = ask(log, now_ns=31 * MS, **both, **words).trigger
        return trigger

    assert starts() is None, "rank 2 was there in the last round"
    assert starts(r2=("pending", 4 * MS)) is None, "it missed that one by a little"
    assert starts(r2=("pending", 6 * MS)) is Trigger.QUORUM, "it has just begun its next step"
    log.append(go(log, fresh(log, 0, 2), fresh(log, 1, 2)))
    assert starts() is Trigger.QUORUM, "it is still at its step of the last round"


def test_the_default_grace_time_is_a_share_of_the_median_round() -> None:
    log = after_first_round(replace(QUORUM_2, grace_ns=-1, grace_share=0.1))
    log.round_us.extend([100, 200, 300])
    assert grace_ns(log.settings, log.median_round_us) == 0.1 * log.median_round_us * 1000 > 0


def test_a_deadline_starts_at_the_first_arrival_and_needs_the_quorum() -> None:
    log = after_first_round(replace(QUORUM_2, mode=Mode.DEADLINE, deadline_ns=20 * MS))
    one: dict[str, Any] = {"r0": ("arrive", 1 * MS)}
    two: dict[str, Any] = {**one, "r1": ("arrive", 3 * MS)}
    assert ask(log, now_ns=30 * MS, **one).trigger is None
    assert ask(log, now_ns=20 * MS, **two).wake_ns == 21 * MS
    assert ask(log, now_ns=21 * MS, **two).trigger is Trigger.DEADLINE


def test_an_automatic_deadline_is_derived_from_median_and_spread() -> None:
    log = after_first_round(replace(QUORUM_2, mode=Mode.DEADLINE, deadline_factor=2.0))
    log.offsets_us.clear()
    assert deadline_ns(log.settings, log.offsets_us) == 0
    log.offsets_us.extend([100, 200, 300, 400, 10_000])
    assert deadline_ns(log.settings, log.offsets_us) == (300 + 2 * 100) * 1000


def test_the_random_initiator_is_equal_on_all_ranks_and_starts_alone() -> None:
    settings = replace(QUORUM_2, mode=Mode.MAJORITY, random_initiator=True)
    log, twin = after_first_round(settings), after_first_round(settings)
    drawn = initiator(log)
    assert drawn == initiator(twin)
    alone: dict[str, Any] = {f"r{drawn.slot}": ARRIVE}
    assert ask(log, **alone).trigger is Trigger.INITIATOR
    others: dict[str, Any] = {f"r{s}": ARRIVE for s in range(4) if s != drawn.slot}
    assert ask(log, **others).trigger is None


def test_every_rank_is_drawn_as_the_initiator_at_times() -> None:
    log = make_log(4, replace(QUORUM_2, mode=Mode.MAJORITY, random_initiator=True))
    drawn = []
    for seq in range(1, 21):
        drawn.append(initiator(log))
        log.append(go(log, *(fresh(log, slot, seq) for slot in range(4))))
    assert len(set(drawn)) == 4


# ---- bench (R13) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.QUORUM, Mode.DEADLINE])
def test_silent_ranks_are_benched_once_the_others_have_waited_long_enough(mode: Mode) -> None:
    log = after_first_round(replace(QUORUM_2, mode=mode, quorum=4, deadline_ns=MS))
    words: dict[str, Any] = {
        "r0": ("arrive", 1 * MS),
        "r1": ("idle", 7 * MS),
        "r2": ("arrive", 2 * MS),
    }
    assert ask(log, now_ns=50 * MS, **words).wake_ns == 107 * MS
    decision = ask(log, now_ns=107 * MS, **words)
    assert (decision.trigger, decision.benched) == (Trigger.BENCH, (member(3),))


def test_the_last_active_rank_is_never_benched() -> None:
    log = after_first_round(QUORUM_2)
    assert ask(log, now_ns=10**12).trigger is None
    assert ask(log, now_ns=10**12, r0=PENDING, r1=PENDING, r2=PENDING, r3=PENDING).trigger is None


def test_a_met_quorum_benches_no_rank() -> None:
    log = after_first_round(QUORUM_2)
    decision = ask(log, now_ns=10**12, r0=ARRIVE, r1=ARRIVE)
    assert (decision.trigger, decision.benched) == (Trigger.QUORUM, ())


def test_the_default_bench_after_is_a_minute_or_twenty_rounds() -> None:
    log = after_first_round(replace(QUORUM_2, bench_after_ns=0))
    assert bench_after_ns(log) == 60 * 10**9
    log.round_us.extend([10 * 10**6] * 8)
    assert bench_after_ns(log) == 200 * 10**9


# ---- late work must not get older (MaxAgePolicy.WAIT) --------------------------------------------


def test_policy_wait_delays_a_round_for_work_that_would_become_stale() -> None:
    settings = replace(QUORUM_2, late=MaxAgePolicy.WAIT, max_age=2)
    log = after_first_round(settings)
    starts = []
    for seq in range(2, 6):
        decision = ask(log, r0=ARRIVE, r1=ARRIVE, r2=ARRIVE)
        starts.append(decision.trigger)
        if decision.trigger:
            log.append(go(log, *(fresh(log, slot, seq) for slot in range(3))))
    # Rank 3 works on version 1: in round 3 its work is two rounds old, so round 3 needs it.
    assert starts[:2] == [Trigger.QUORUM, Trigger.QUORUM]
    assert log.version == 3
    assert starts[2:] == [None, None]
    assert ask(log, r0=ARRIVE, r1=ARRIVE, r2=ARRIVE, r3=ARRIVE).trigger is Trigger.ALL


def test_policy_wait_counts_age_from_the_weights_of_the_current_batch() -> None:
    log = after_first_round(replace(QUORUM_2, late=MaxAgePolicy.WAIT, max_age=2))
    pending = replace(fresh(log, 3, 2), fresh=False, base=1)
    log.append(go(log, fresh(log, 0, 2), fresh(log, 1, 2)))
    log.append(go(log, fresh(log, 0, 3), fresh(log, 1, 3), pending))
    assert log.heard[member(3)] == 1, "named in round 2, but its next batch is of version 1"
    assert ask(log, r0=ARRIVE, r1=ARRIVE, r2=ARRIVE).trigger is None


# ---- something to do (R12) -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "something"),
    [
        (idle(0), False),
        (idle(0, resting=True), True),
        (idle(0, returned=(0,)), True),
        (Share(member(0), upto=1, count=1, samples=4, unit=4, leases=(0,)), True),
    ],
)
def test_a_tail_round_needs_something_to_apply_or_record(share: Share, something: bool) -> None:
    log = make_log(1, QUORUM_2)
    here = {member(0): Arrival(AnnounceKind.IDLE, 0, share)}
    decision = decide(table(log, here), now_ns=0, has_request=False)
    assert (decision.trigger is Trigger.TAIL) == something
    asked = decide(table(log, here), now_ns=0, has_request=True)
    assert asked.trigger is Trigger.TAIL


def test_a_ready_joiner_starts_a_tail_round_but_does_not_count_in_a_quorum() -> None:
    log = after_first_round(QUORUM_2)
    ready = {member(9): Arrival(AnnounceKind.READY, 0, idle(9))}
    idlers = {member(s): Arrival(AnnounceKind.IDLE, 0, idle(s)) for s in range(4)}
    both = decide(table(log, {**idlers, **ready}), now_ns=0, has_request=False)
    assert both.trigger is Trigger.TAIL
    one = {member(0): Arrival(AnnounceKind.ARRIVE, 0, fresh(log, 0))}
    assert decide(table(log, {**one, **ready}), now_ns=0, has_request=False).trigger is None


def test_a_self_fed_job_ends_when_all_loops_have_ended() -> None:
    log = make_log(2, QUORUM_2, DataPlan())
    done = {
        member(s): Arrival(AnnounceKind.IDLE, 0, idle(s, resting=True, done=True)) for s in range(2)
    }
    decision = decide(table(log, done), now_ns=0, has_request=False)
    assert decision.trigger is Trigger.TAIL
    log.append(
        go(log, *(a.share for a in done.values() if a.share is not None), trigger=Trigger.TAIL)
    )
    assert log.stopped
