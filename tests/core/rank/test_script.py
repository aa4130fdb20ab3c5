"""Resuming the script's thread, and sending messages again, event by event (R8, R17)."""

from __future__ import annotations

import pytest
from msgspec import Struct
from msgspec.structs import replace
from paceline.core.messages import (
    Announce,
    Commit,
    Endpoints,
    Fatal,
    Leaving,
    Prepare,
    Start,
    Stopped,
)
from paceline.core.protocol.records import (
    AnnounceKind,
    Benched,
    DataPlan,
    Drop,
    DropReason,
    Gen,
    Share,
)
from paceline.core.protocol.snapshot import Kept
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline_api.ids import GenerationId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.makers import fresh, go, member, members

ME = member(0)
ENDS = Endpoints("t", "d")


def lone(plan: DataPlan, rules: RoundSettings | None = None) -> Rank:
    """Build a job of one rank whose script has begun and computes its first step."""
    rank = Rank(ME, pid=1, host="h", endpoints=ENDS)
    take(rank, ev.Begin("same", plan, 2), Prepare(GenerationId(1, "c", 1)))
    rules = rules or RoundSettings()
    new = Gen(
        rank.state.promise, (ME,), (ME,), (ME,), 0, lookahead=((ME, 2),), plan=plan, settings=rules
    )
    take(rank, Commit(new, ME, (), ME, (), ((ME, ENDS),)), ev.ChannelOpened())
    return rank


def take(rank: Rank, *events: ev.Event) -> list[ev.Effect]:
    return [effect for event in events for effect in rank.handle(0, event)]


def step(rank: Rank) -> list[ev.Effect]:
    return take(rank, ev.Step(rank.state.log.held(ME)[:1], 4, 4))


def resumed(effects: list[ev.Effect]) -> list[tuple[int, bool, bool]]:
    return [(e.version, e.fresh, e.stopped) for e in effects if isinstance(e, ev.Resume)]


def announced(effects: list[ev.Effect]) -> list[Announce]:
    messages = [e.message for e in effects if isinstance(e, ev.ToPeer)]
    return [message for message in messages if isinstance(message, Announce)]


def sent_count(effects: list[ev.Effect], kind: type[Struct]) -> int:
    return sum(isinstance(e, ev.ToCoordinator) and isinstance(e.message, kind) for e in effects)


def test_the_last_round_resumes_the_script_with_stopped_set() -> None:
    rank = lone(DataPlan(samples=8, batch=4, epochs=1, seed=1))
    assert resumed(step(rank)) == [], "its round is not committed"
    assert resumed(take(rank, ev.Reduced())) == [(1, True, False)]
    step(rank)
    assert resumed(take(rank, ev.Reduced())) == [(2, True, True)]


def test_a_script_resumes_after_evaluation() -> None:
    rank = lone(DataPlan(samples=40, batch=4, epochs=1, seed=1), RoundSettings(mode=Mode.SOLO))
    assert resumed(take(rank, ev.Rest(), ev.Reduced())) == []
    assert rank.state.log.resting == {ME}
    assert resumed(take(rank, ev.Unrest())) == [(1, False, False)]


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.SHADOW])
def test_in_full_mode_an_evaluating_rank_is_awaited_and_keeps_its_leases(mode: Mode) -> None:
    plan, rules = DataPlan(samples=40, batch=4, epochs=1, seed=1), RoundSettings(mode=mode)
    rank = second_of_two(plan, rules)
    held = rank.state.log.held(rank.state.me)
    effects = take(rank, ev.Rest())
    assert not any(isinstance(e, ev.ToPeer) for e in effects), "it has announced nothing"
    assert [version for version, *_ in resumed(take(rank, ev.Unrest()))] == [0]
    assert rank.state.usable() == held
    announcements = announced(take(rank, ev.Step(held[:1], 4, 4)))
    assert [(x.kind, x.share.leases) for x in announcements] == [(AnnounceKind.ARRIVE, held[:1])]
    leaver = second_of_two(plan, rules)
    announcements = announced(take(leaver, ev.Rest(), ev.Drain()))
    assert [(x.kind, x.share.returned) for x in announcements] == [(AnnounceKind.IDLE, held)]


@pytest.mark.parametrize("ends", ["applied", "announced again"])
def test_a_rank_back_from_evaluation_has_no_fresh_gradient(ends: str) -> None:
    """The rank's earlier gradient is older than the weights, and stays idle work of that age.

    This also holds if everything is announced again (R8, R11, I6).
    """
    rank = second_of_two(DataPlan(steps=9))
    log = rank.state.log
    other = Share(member(0), upto=1, count=1, fresh=True, samples=1, unit=1)
    take(rank, ev.Step((), 1, 1), Start(go(log, other)), ev.Reduced(), ev.Rest())
    share = rank.state.share
    assert share is not None
    assert (share.idle, share.fresh, share.count, share.oldest) == (True, False, 1, 0)
    assert resumed(take(rank, ev.Unrest())) == [], "what it announced lies in its way"
    if ends == "applied":
        other = replace(other, upto=2, oldest=1)
        effects = take(rank, Start(go(log, other, share)), ev.Reduced())
        assert resumed(effects) == [(2, False, False)]
        assert rank.state.pending.empty
    else:
        assert resumed(formed_again(rank)) == [(1, False, False)]
        again = rank.state.share
        assert again is not None
        assert (again.idle, again.fresh, again.count, again.oldest) == (False, False, 1, 0)
        assert not rank.state.announced, "PENDING: it computes"


def test_messages_that_a_lost_connection_may_have_dropped_are_sent_again() -> None:
    rank = lone(DataPlan(samples=4, batch=4, epochs=1, seed=1))
    step(rank)
    assert sent_count(take(rank, ev.Reduced()), Stopped) == 1
    assert sent_count(take(rank, ev.Tick()), Stopped) == 0
    assert sent_count(take(rank, ev.Connected()), Stopped) == 1
    leaver = lone(DataPlan(samples=40, batch=4, epochs=1, seed=1))
    assert sent_count(take(leaver, ev.Drain(), ev.Want(), ev.Reduced()), Leaving) == 1
    assert sent_count(take(leaver, ev.Tick()), Leaving) == 0
    assert sent_count(take(leaver, ev.Connected()), Leaving) == 1


def test_a_fatal_error_is_sent_again_on_each_connection() -> None:
    """The agent may have no connection when the error is found, so the message would be lost."""
    rank = lone(DataPlan(samples=40, batch=4, epochs=1, seed=1))
    first = take(rank, ev.NotRestored("its disk is gone"), ev.NotRestored("another one"))
    for effects in (first, take(rank, ev.Connected()), take(rank, ev.Connected())):
        faults = [e.message for e in effects if isinstance(e, ev.ToCoordinator)]
        fatal = [x for x in faults if isinstance(x, Fatal)]
        assert fatal
        assert set(fatal) == {Fatal(ME, "CheckpointUnusable", "its disk is gone")}, "the first one"
        assert sent_count(effects, Fatal) == (2 if effects is first else 1)
    assert sent_count(take(rank, ev.Tick()), Fatal) == 0


def test_a_script_waiting_for_a_round_resumes_when_a_checkpoint_is_restored() -> None:
    """The restored log may end at the very version that the script's step was computed on."""
    rank = lone(DataPlan(samples=40, batch=4, epochs=1, seed=1))
    log = rank.state.log
    step(rank)
    take(rank, ev.Reduced())
    kept = Kept(log.id, 1, log.digest)
    snapshot = log.snapshot()
    step(rank)
    new = GenerationId(1, "c", 2)
    gen = Gen(
        new, (ME,), (ME,), (ME,), 1, lookahead=((ME, 2),), plan=log.plan, settings=log.settings
    )
    commit = Commit(gen, ME, (), ME, (), ((ME, ENDS),), restore=kept)
    assert ev.Restore(kept) in take(rank, Prepare(new), commit)
    effects = take(rank, ev.Restored(snapshot), ev.ChannelOpened())
    assert resumed(effects) == [(1, False, False)]
    assert rank.state.pending.empty
    assert rank.state.pending.lost == 4


def second_of_two(plan: DataPlan, rules: RoundSettings | None = None) -> Rank:
    """Build a rank that computes its first step; the other rank starts the rounds."""
    me, both = member(1), members(0, 1)
    rank = Rank(me, pid=1, host="h", endpoints=ENDS)
    take(rank, ev.Begin("same", plan, 2), Prepare(GenerationId(1, "c", 1)))
    rules = rules or RoundSettings(mode=Mode.SOLO)
    ahead = tuple((m, 2) for m in both)
    gen = Gen(rank.state.promise, both, both, both, 0, lookahead=ahead, plan=plan, settings=rules)
    ends = tuple((m, ENDS) for m in both)
    take(rank, Commit(gen, both[0], (), both[0], (), ends), ev.ChannelOpened())
    return rank


def formed_again(rank: Rank) -> list[ev.Effect]:
    """Let the same two ranks form another generation."""
    log, both = rank.state.log, members(0, 1)
    new = GenerationId(1, "c", 2)
    ahead = tuple((m, 2) for m in both)
    gen = Gen(new, both, both, both, log.version, lookahead=ahead, plan=log.plan)
    ends = tuple((m, ENDS) for m in both)
    commit = Commit(gen, both[0], (), both[0], (), ends)
    return take(rank, Prepare(new), commit, ev.ChannelOpened())


def test_a_rank_that_missed_a_round_jumps_ahead_and_keeps_its_gradient() -> None:
    rank = second_of_two(DataPlan(samples=40, batch=4, epochs=1, seed=1))
    me = rank.state.me
    log = rank.state.log
    take(rank, ev.Step(log.held(me)[:1], 4, 4))
    without = go(log, fresh(log, 0))
    assert resumed(take(rank, Start(without), ev.Reduced())) == [(1, False, False)]
    assert rank.state.facts.jumps == 1
    assert [x.version for x in rank.state.pending.late.steps] == [0]


def test_a_rank_benched_during_a_step_drops_that_step() -> None:
    """Without leases nothing else would show that the step is void (R13)."""
    rank = second_of_two(DataPlan(steps=9))
    log = rank.state.log
    one = Share(member(0), upto=1, count=1, fresh=True, samples=1, unit=1)
    take(rank, Start(go(log, one, benched=(Benched(rank.state.me, ()),))), ev.Reduced())
    assert rank.state.pending.void


@pytest.mark.parametrize(("every", "when"), [(2, [False, True, True]), (0, [False] * 3)])
def test_buffers_are_averaged_at_the_configured_interval_and_in_the_last_round(
    every: int, when: list[bool]
) -> None:
    """If `buffers_every` is 0, buffers stay local and are never averaged."""
    plan = DataPlan(samples=12, batch=4, epochs=1, seed=1)
    rank = lone(plan, RoundSettings(buffers_every=every))
    synced = []
    for _ in range(3):
        synced += [e.go.sync for e in step(rank) if isinstance(e, ev.Reduce)]
        take(rank, ev.Reduced())
    assert synced == when


def test_only_a_held_and_unprocessed_lease_can_be_skipped() -> None:
    rank = lone(DataPlan(samples=40, batch=4, epochs=1, seed=1))
    first, second = rank.state.log.held(ME)
    take(rank, ev.Skip(9, 4))
    assert rank.state.pending.empty, "another rank may hold it"
    take(rank, ev.Step((first,), 4, 4), ev.Skip(first, 4))
    assert rank.state.pending.drops == []
    take(rank, ev.Skip(second, 4))
    assert rank.state.pending.drops == [Drop(DropReason.SKIPPED, 4, (second,))]
    assert rank.state.pending.produced == 8


# ---- with a pipeline (R36, R37) ------------------------------------------------------------------

PIPELINE = RoundSettings(pipeline=1)
LONG = DataPlan(samples=40, batch=4, epochs=1, seed=1)


def kinds(effects: list[ev.Effect]) -> list[str]:
    return [type(e).__name__ for e in effects if not isinstance(e, ev.Held | ev.ToCoordinator)]


def test_a_pipelined_step_returns_at_once_and_the_next_one_waits_for_it() -> None:
    rank = lone(LONG, PIPELINE)
    first, *_ = rank.state.log.held(ME)
    effects = take(rank, ev.Step((first,), 4, 4))
    assert resumed(effects) == [(0, True, False)], "on the weights without it"
    assert kinds(effects) == ["ChangeBuffers", "Resume", "Reduce"]
    [reduce] = [e for e in effects if isinstance(e, ev.Reduce)]
    assert reduce.source == "held", "the next batch adds to the other buffer meanwhile"
    _, second = rank.state.log.held(ME)
    assert resumed(take(rank, ev.Step((second,), 4, 4))) == []
    effects = take(rank, ev.Reduced())
    assert resumed(effects) == [(1, True, False)]
    assert kinds(effects).index("Apply") < kinds(effects).index("Resume")
    [reduce] = [e for e in effects if isinstance(e, ev.Reduce)]
    assert reduce.go.round == 1


def test_flush_waits_only_for_the_gradient_in_flight() -> None:
    rank = lone(LONG, PIPELINE)
    step(rank)
    assert resumed(take(rank, ev.Flush())) == []
    assert resumed(take(rank, ev.Reduced())) == [(1, False, False)]
    assert resumed(take(rank, ev.Flush())) == [(1, False, False)]


def test_a_gradient_that_is_not_finite_counts_as_an_arrival() -> None:
    rank = lone(LONG, PIPELINE)
    effects = take(rank, ev.Step(rank.state.log.held(ME)[:1], 4, 4, finite=False))
    assert resumed(effects) == [(0, True, False)]
    [reduce] = [e for e in effects if isinstance(e, ev.Reduce)]
    assert reduce.source is None
    assert [d.samples for s in reduce.go.listed for d in s.drops] == [4]


def test_a_drain_waits_for_gradients_in_flight() -> None:
    rank = lone(LONG, PIPELINE)
    step(rank)
    second = rank.state.log.held(ME)[1:]
    assert resumed(take(rank, ev.Drain(), ev.Step(second, 4, 4))) == []
    take(rank, ev.Reduced())
    assert sent_count(take(rank, ev.Reduced()), Leaving) == 1
    assert rank.state.log.ledger.total().applied == 8


def test_dropping_a_stale_gradient_keeps_the_fresh_one() -> None:
    """In LATE, both gradients would form one sum, as old as its oldest batch (D4)."""
    rules = replace(PIPELINE, max_age=1)
    rank = second_of_two(LONG, rules)
    me, log = rank.state.me, rank.state.log
    take(rank, ev.Step(log.held(me)[:1], 4, 4))
    assert rank.state.share is not None
    take(rank, Start(go(log, fresh(log, 0), rank.state.share)), ev.Reduced())
    second, third = log.held(me)
    take(rank, ev.Step((second,), 4, 4), ev.Step((third,), 4, 4))
    take(rank, Start(go(log, replace(fresh(log, 0, 2), oldest=0))), ev.Reduced())
    share = rank.state.share
    assert (share.count, share.fresh, share.oldest) == (1, True, log.version - 1)
    assert [(d.reason, d.leases) for d in share.drops] == [(DropReason.STALE, (second,))]
