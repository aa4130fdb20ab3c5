"""The ledger counts a share as late or fresh, dropped and why, discounted, or dealt again."""

from __future__ import annotations

from msgspec.structs import replace
from paceline.core.protocol.composition import compact
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import (
    AnnounceKind,
    Benched,
    DataPlan,
    Drop,
    DropReason,
    Gen,
    LoggedMetric,
    Trigger,
)
from paceline.core.protocol.snapshot import EpochCount, Totals
from paceline_api.ids import GenerationId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.makers import fresh, go, idle, make_log, member


def solo(ranks: int, plan: DataPlan | None = None) -> Log:
    rules = RoundSettings(mode=Mode.SOLO)
    return make_log(ranks, rules) if plan is None else make_log(ranks, rules, plan)


def test_only_a_gradient_that_missed_its_round_counts_as_late() -> None:
    log = solo(2)
    first = fresh(log, 1)
    log.append(go(log, fresh(log, 0), idle(1)))
    assert log.ledger.by_member[member(0)] == Totals(applied=4, late=0, rounds=1)
    assert log.ledger.by_member[member(1)] == Totals(applied=0, late=0, dropped=0, rounds=0)
    assert log.ledger.open_epochs == {0: EpochCount(0, leases=1, applied=4, dropped=0)}
    log.append(go(log, replace(first, fresh=False)))
    assert log.ledger.by_member[member(1)] == Totals(applied=4, late=4, rounds=1)


def test_older_gradients_carried_by_a_fresh_one_count_as_late() -> None:
    plan = DataPlan(samples=10, batch=4, epochs=1, seed=1)
    log = solo(2, plan)
    log.append(go(log, idle(0)))
    both = replace(
        fresh(log, 0),
        upto=2,
        count=2,
        oldest=log.version - 1,
        samples=6,
        leases=log.held(member(0)),
    )
    log.append(go(log, both))
    assert log.ledger.by_member[member(0)] == Totals(applied=6, late=4, rounds=1)
    assert log.ledger.contributions == 2
    own = solo(1, DataPlan(steps=9))
    own.append(go(own, idle(0)))
    own.append(go(own, replace(both, leases=(), samples=2)))
    assert own.ledger.by_member[member(0)].late == 1, "nothing is dealt: a step is one sample"


def test_metrics_of_the_last_epoch_include_only_its_rounds() -> None:
    """The mean over the whole run once showed 0.743 where the last epoch had 0.221.

    A copy of the log, such as that of a checkpoint, continues with the same figures.
    """
    log = solo(1, DataPlan(samples=8, batch=4, epochs=3, seed=1))
    for seq, loss in enumerate((4.0, 2.0, 1.0, 0.5), 1):
        share = replace(fresh(log, 0, seq), metrics=(LoggedMetric("loss", 4 * loss, 4.0),))
        log.append(go(log, share))
        if seq == 1:
            assert log.ledger.last_epoch == {}
        if seq == 2:
            assert log.ledger.last_epoch == {"loss": (24.0, 8.0)}
            log = Log.restore(log.snapshot())
    assert log.ledger.last_epoch == {"loss": (6.0, 8.0)}
    assert log.ledger.metrics == {"loss": (30.0, 16.0)}
    assert Log.restore(log.snapshot()).ledger.snapshot() == log.ledger.snapshot()


def test_gradients_of_an_earlier_run_are_counted_separately() -> None:
    log = solo(1, DataPlan(samples=8, batch=4, epochs=3, seed=1))
    log.append(go(log, fresh(log, 0, 1)))
    assert (log.ledger.contributions, log.ledger.contributions_before) == (1, 0)
    resumed = Log.restore(log.snapshot())
    everybody = resumed.members
    again = GenerationId(1, "b", 2)
    plan, rules = resumed.plan, resumed.settings
    ahead = tuple((m, 2) for m in everybody)
    resumed.append(
        Gen(again, everybody, everybody, everybody, 1, lookahead=ahead, plan=plan, settings=rules)
    )
    resumed.append(go(resumed, fresh(resumed, 0, 1)))
    assert (resumed.ledger.contributions, resumed.ledger.contributions_before) == (2, 1)


def test_dropped_samples_are_counted_by_reason_and_make_their_epoch_short() -> None:
    plan = DataPlan(samples=8, batch=4, epochs=2, seed=1)
    log = solo(1, plan)
    first, second = log.held(member(0))
    stale = Drop(DropReason.STALE, 4, (first,))
    skipped = Drop(DropReason.SKIPPED, 4, (second,))
    log.append(go(log, idle(0, drops=(stale,))))
    assert (log.ledger.epochs_exact, log.ledger.epochs_short) == (0, 0)
    log.append(go(log, idle(0, drops=(skipped,))))
    assert (log.ledger.epochs_exact, log.ledger.epochs_short) == (0, 1)
    log.append(go(log, fresh(log, 0)))
    log.append(go(log, fresh(log, 0, 2)))
    assert (log.ledger.epochs_exact, log.ledger.epochs_short) == (1, 1)
    assert log.ledger.dropped == {DropReason.STALE: 4, DropReason.SKIPPED: 4}
    assert log.ledger.total() == Totals(applied=8, dropped=8, rounds=2)
    assert log.ledger.counted(member(0)) == 16
    assert not log.ledger.open_epochs


def test_samples_lost_to_a_discount_are_counted() -> None:
    log = solo(1)
    log.append(go(log, replace(fresh(log, 0), discount=0.25)))
    assert log.ledger.by_member[member(0)].discounted == 3.0


def test_leases_of_benched_and_departed_ranks_are_counted_as_dealt_again() -> None:
    log = solo(3)
    out = Benched(member(2), log.held(member(2))[:1])
    log.append(go(log, fresh(log, 0), benched=(out,), trigger=Trigger.BENCH))
    assert log.ledger.by_member[member(2)] == Totals(redealt=4)
    stay = (member(0),)
    log.append(Gen(GenerationId(1, "a", 2), stay, stay, stay, log.version))
    assert set(log.ledger.by_member) <= {member(0)}
    assert log.ledger.departed.redealt == 4 * 4, "two leases of each"
    assert log.ledger.rounds == {Trigger.BENCH: 1}


def test_a_round_across_the_end_of_an_epoch_counts_in_both_epochs() -> None:
    log = solo(2, DataPlan(samples=12, batch=4, epochs=2, seed=1))
    for _ in range(2):
        log.append(compact(log, go(log), dict.fromkeys(log.active, (AnnounceKind.ARRIVE, 0))))
    assert log.ledger.epochs_exact == 1
    assert log.ledger.open_epochs == {1: EpochCount(1, leases=1, applied=4, dropped=0)}
