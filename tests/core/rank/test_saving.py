"""Choosing the versions to save as checkpoints, and publishing them (R19, R26, C1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from paceline.core.coordinator.forming import Broken, EvidenceWait, Finished, form
from paceline.core.coordinator.sizes import Sizes
from paceline.core.messages import (
    Commit,
    Endpoints,
    Prepare,
    Prepared,
    Register,
    Release,
    Saved,
)
from paceline.core.protocol.records import DataPlan, Gen
from paceline.core.protocol.rows import rows_of
from paceline.core.protocol.snapshot import Kept, LogSnapshot
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline.core.rank.state import CheckpointStage
from paceline_api.ids import NO_GENERATION, GenerationId
from paceline_api.rounds import RoundSettings

from testing.makers import member

ME = member(0)
ENDS = Endpoints("t", "d")
GEN = GenerationId(1, "c", 1)
PLAN = DataPlan(samples=40, batch=4, epochs=1, seed=1)


class Lone:
    """A job of one rank, round by round; `last` holds the effects of the last event."""

    def __init__(self, every: int) -> None:
        self.rank = Rank(ME, pid=1, host="h", endpoints=ENDS, save_every=every)
        self.last: list[ev.Effect] = []
        gen = Gen(
            GEN, (ME,), (ME,), (ME,), 0, lookahead=((ME, 2),), plan=PLAN, settings=RoundSettings()
        )
        commit = Commit(gen, ME, (), ME, (), ((ME, ENDS),))
        self.take(ev.Begin("same", PLAN, 2), Prepare(GEN), commit, ev.ChannelOpened())

    def take(self, *events: ev.Event) -> list[ev.Effect]:
        for event in events:
            self.last = self.rank.handle(0, event)
        return self.last

    def round(self) -> None:
        lease = self.rank.state.log.held(ME)[0]
        self.take(ev.Step((lease,), 4, 4), ev.Reduced())

    def orders(self) -> list[ev.Effect]:
        kinds = ev.Save | ev.Publish | ev.Unsave | ev.Exit
        return [e for e in self.last if isinstance(e, kinds)]

    @property
    def stage(self) -> CheckpointStage:
        return self.rank.state.saving.stage


def saves(effects: Iterable[ev.Effect]) -> list[int]:
    return [e.log.version for e in effects if isinstance(e, ev.Save)]


def test_every_nth_version_is_saved_and_published_with_the_next() -> None:
    job = Lone(every=2)
    job.round()
    assert job.orders() == []
    job.round()
    assert saves(job.last) == [2]
    assert job.take(ev.Written(2)) == [], "R19: nobody has committed version 3"
    job.round()
    assert job.orders() == [ev.Publish(2)]
    job.take(ev.Tick())
    assert job.orders() == [], "once"
    messages = [e.message for e in job.take(ev.Published(2)) if isinstance(e, ev.ToCoordinator)]
    assert messages == [Saved(ME, 2)]
    assert job.stage is CheckpointStage.NONE


def test_a_checkpoint_written_late_is_published_at_once() -> None:
    job = Lone(every=2)
    for _ in range(3):
        job.round()
    job.take(ev.Written(2))
    assert job.orders() == [ev.Publish(2)]


def test_a_slow_disk_skips_checkpoints_without_blocking_rounds() -> None:
    job = Lone(every=1)
    for _ in range(5):
        job.round()
    assert job.rank.state.log.version == 5
    assert job.rank.state.saving.skipped == 4
    job.take(ev.Written(1), ev.Published(1))
    job.round()
    assert saves(job.last) == [6]


def test_a_failed_checkpoint_is_reported_and_the_next_is_attempted() -> None:
    job = Lone(every=1)
    job.round()
    messages = [e.message for e in job.take(ev.Written(1, "no space")) if hasattr(e, "message")]
    assert messages == [Saved(ME, 1, "no space")]
    job.round()
    assert saves(job.last) == [2]


def test_the_final_version_is_saved_and_published_only_with_the_release() -> None:
    job = Lone(every=7)
    for _ in range(10):
        job.round()
    # Version 7 was written and published before the end, so the final one is not skipped.
    job.take(ev.Written(7))
    assert job.orders() == [ev.Publish(7)]
    final = [e for e in job.take(ev.Published(7)) if isinstance(e, ev.Save)]
    assert [(e.log.version, e.finished) for e in final] == [(10, True)]
    job.take(ev.Written(10))
    assert job.orders() == []
    assert job.take(Release(GEN, 10))[0] == ev.Publish(10)
    assert not [e for e in job.last if isinstance(e, ev.Exit)]
    job.take(ev.Published(10))
    assert job.orders() == [ev.Exit(finished=True, why="released")]


def test_a_hanging_disk_does_not_keep_a_released_rank_forever() -> None:
    job = Lone(every=100)
    for _ in range(10):
        job.round()
    [wake] = [e for e in job.take(Release(GEN, 10)) if isinstance(e, ev.WakeAt)]
    effects = job.rank.handle(wake.at_ns, ev.Tick())
    assert next(e for e in effects if isinstance(e, ev.Exit)).finished


def test_a_released_rank_that_is_still_writing_joins_no_new_generation() -> None:
    job = Lone(every=100)
    for _ in range(10):
        job.round()
    job.take(Release(GEN, 10))
    [registration] = [
        e.message for e in job.take(Prepare(GenerationId(2, "d", 1))) if hasattr(e, "message")
    ]
    assert isinstance(registration, Register)
    assert registration.released == (GEN, 10)


# ---- the first generation of a job that has trained ----------------------------------------------

NEW = GenerationId(4, "c", 9)
OLD = Kept(GenerationId(1, "a", 3), 20, "old")
NEWER = Kept(GenerationId(2, "b", 1), 12, "newer")


def report(slot: int, checkpoint: Kept | None, **more: Any) -> Prepared:
    base = Rank(member(slot), pid=1, host="h", endpoints=ENDS)
    base.handle(0, ev.CheckpointFound(checkpoint))
    base.handle(0, ev.Begin("same", PLAN, 2))
    [prepared] = [
        e.message for e in base.handle(0, Prepare(NEW)) if isinstance(e, ev.ToCoordinator)
    ]
    assert isinstance(prepared, Prepared)
    return replace(prepared, **more)


def answer(*reports: Prepared, unaccounted: str = "", had_state: bool = True) -> object:
    registers = {
        r.member: Register(
            r.member,
            1,
            "h",
            ENDS,
            NO_GENERATION,
            NO_GENERATION,
            0,
            False,
            True,
            fingerprint="same",
            plan=PLAN,
        )
        for r in reports
    }
    return form(
        NEW,
        {r.member: r for r in reports},
        registers,
        dead={},
        unaccounted=unaccounted,
        possible_ranks=len(reports),
        wanted_ranks=len(reports),
        settings=RoundSettings(),
        had_state=had_state,
        state_lost="lost" if had_state else "",
        sizes=Sizes(),
        draining=(),
    )


def test_the_checkpoint_of_the_latest_generation_is_restored() -> None:
    commit = answer(report(0, OLD), report(1, NEWER), report(2, NEWER), report(3, None))
    assert isinstance(commit, Commit)
    assert commit.restore == NEWER
    assert commit.gen.with_state == (member(1), member(2))
    assert (commit.gen.version, commit.donor) == (12, member(1))
    assert set(commit.joiners) == {member(0), member(3)}
    assert commit.gen.plan == PLAN


def test_no_checkpoint_is_restored_while_a_rank_may_have_newer_weights() -> None:
    assert isinstance(answer(report(0, OLD), unaccounted="rank 1 is silent"), EvidenceWait)


def test_a_new_run_with_a_checkpoint_waits_for_silent_ranks() -> None:
    got = answer(report(0, OLD), report(1, None), unaccounted="rank 2 is silent", had_state=False)
    assert isinstance(got, EvidenceWait)


def test_without_a_checkpoint_the_state_is_lost() -> None:
    got = answer(report(0, None))
    assert isinstance(got, Broken)
    assert got.reason == "StateLost"


def test_an_unusable_checkpoint_fails_the_job_and_is_named() -> None:
    got = answer(report(0, OLD), report(1, None, checkpoint_problem="checkpoint v9 is damaged"))
    assert got == Broken("CheckpointUnusable", "checkpoint v9 is damaged")


def test_a_finished_job_stays_finished() -> None:
    end = Kept(OLD.generation, 20, "old", finished=True)
    assert answer(report(0, end), report(1, end)) == Finished(end)


@pytest.mark.parametrize("version", [11, 12, 13])
def test_a_checkpoint_of_a_later_generation_beats_older_live_weights(
    version: int,
) -> None:
    """The only live rank was left out of the group long ago."""
    left_out = report(
        0,
        NEWER,
        has_state=True,
        last=GenerationId(1, "a", 3),
        version=version,
        gen_active=rows_of([member(0)]),
    )
    got = answer(left_out)
    assert isinstance(got, Commit)
    assert got.restore == NEWER


def test_live_state_is_preferred_to_its_own_older_checkpoint() -> None:
    holder = report(
        0,
        OLD,
        has_state=True,
        last=OLD.generation,
        version=21,
        gen_active=rows_of([member(0)]),
        members=rows_of([member(0)]),
        tail=((0, ""),),
    )
    got = answer(holder)
    assert isinstance(got, Commit)
    assert got.restore is None
    assert got.gen.version == 21


# ---- the log of a job that continues -------------------------------------------------------------


def test_a_restored_log_deals_held_leases_again_and_continues_after_a_stop() -> None:
    job = Lone(every=3)
    for _ in range(3):
        job.round()
    [save] = [e for e in job.last if isinstance(e, ev.Save)]
    snapshot: LogSnapshot = with_stop(save.log)
    again = Rank(ME, pid=1, host="h", endpoints=ENDS, save_every=3)
    kept = Kept(GEN, 3, snapshot.digest)
    gen = Gen(
        NEW, (ME,), (ME,), (ME,), 3, lookahead=((ME, 2),), plan=PLAN, settings=RoundSettings()
    )
    commit = Commit(gen, ME, (), ME, (), ((ME, ENDS),), restore=kept)
    again.handle(0, ev.Begin("same", PLAN, 2))
    again.handle(0, Prepare(NEW))
    assert ev.Restore(kept) in again.handle(0, commit)
    effects = again.handle(0, ev.Restored(snapshot))
    assert saves(effects) == [], "it lies on the disk already"
    log = again.state.log
    assert (log.version, log.started, log.stopped) == (3, 3, False)
    assert log.held(ME) == snapshot.held[0][1], "the same leases, dealt anew"
    assert log.ledger.total().applied == 12


def with_stop(log: LogSnapshot) -> LogSnapshot:
    return replace(log, stopping=True, done=(ME,))
