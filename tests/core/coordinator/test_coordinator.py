"""Single decisions of the coordinator; many tests are regressions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.coordinator.events import Event
from paceline.core.coordinator.hearing import COMPLAINTS_MAX
from paceline.core.coordinator.report import status
from paceline.core.coordinator.state import CoordinatorPhase, CoordinatorState
from paceline.core.log_figures import pack_log
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.rows import rows_of
from paceline.core.protocol.snapshot import Kept
from paceline.core.status import Fact
from paceline.local.report import summary
from paceline.local.timeline import Timeline
from paceline_api.ids import ATTEMPT_STRIDE, NO_GENERATION, GenerationId, MemberId
from paceline_api.settings import FailureRuleSettings
from paceline_api.status import LogStatus, Status
from paceline_api.types.enums import FailureAction

from testing.makers import GEN_1, PLAN, member, pod_beat

MS = 10**6
SETTLE_MS = 300
FREEZE_MS = 400
CONNECT_MS = 300
A, B, C = (member(s) for s in range(3))
NO_PART = "ScriptTakesNoPart"


@dataclass
class Desk:
    """A coordinator with ranks that act as the test says."""

    replicas: int = 2
    min_replicas: int = 1
    allowed: tuple[int, ...] = ()
    rules: tuple[FailureRuleSettings, ...] = ()
    max_skipped: int = 0
    backoff_limit: int = 6
    checkpoint_required: bool = False
    now: int = 0
    coordinator: coord.Coordinator = field(init=False)

    def __post_init__(self) -> None:
        config = coord.Config(
            "job",
            self.replicas,
            min_replicas=self.min_replicas,
            allowed_sizes=self.allowed,
            backoff_limit=self.backoff_limit,
            checkpoint_required=self.checkpoint_required,
            failure_rules=self.rules,
            max_skipped_batches=self.max_skipped,
            stabilization_ns=100 * MS,
            settle_ns=SETTLE_MS * MS,
            freeze_timeout_ns=FREEZE_MS * MS,
            connect_timeout_ns=CONNECT_MS * MS,
        )
        self.coordinator = coord.Coordinator(config, uid="a", now_ns=0)

    @property
    def state(self) -> CoordinatorState:
        return self.coordinator.state

    def post(self, event: coord.Event, ms: int = 1) -> list[Struct]:
        """Handle an event and return the messages sent to ranks and agents."""
        self.now += ms * MS
        effects = self.coordinator.handle(self.now, event)
        return [e.message for e in effects if isinstance(e, coord.ToRank | coord.ToAgent)]

    def say(self, message: m.RankMessage | m.Heartbeat, ms: int = 1) -> list[Struct]:
        if isinstance(message, m.Heartbeat):
            return self.post(coord.FromAgent(pod_beat(message)), ms)
        return self.post(coord.FromRank(message), ms)

    def pods(self, *slots: int, **facts: bool) -> None:
        known = self.state.roster.inventory
        revision = known.revision + 1 if known else 1
        inventory = m.Inventory(revision, tuple((s, 0) for s in slots), **facts)
        self.post(coord.SetInventory(inventory))

    def agent(self, who: MemberId) -> None:
        self.post(coord.FromAgent(m.AgentHello(who.slot, 0, "h", "", (who,), ())))

    def form(self, *who: MemberId, plan: DataPlan = PLAN) -> GenerationId:
        """Form and start a first generation of these ranks."""
        for each in who:
            self.agent(each)
        for each in who:
            self.say(register(each, plan=plan))
        for each in who:
            self.say(prepared(each, self.state.proposal))
        for each in who:
            self.say(m.Started(self.state.proposal, each, True))
        assert self.state.phase is CoordinatorPhase.RUNNING
        proposal: GenerationId = self.state.proposal
        return proposal


SETS = ("members", "with_state", "active", "benched", "gen_active")
"""Fields of a report that are sets of members."""


def register(who: MemberId, last: GenerationId = NO_GENERATION, **facts: Any) -> m.Register:
    given = {
        "promise": last,
        "version": 0,
        "has_state": last != NO_GENERATION,
        "plan": PLAN,
        "ready": True,
        **facts,
    }
    given |= {name: rows_of(given[name]) for name in SETS if name in given}
    return m.Register(
        member=who,
        pid=1,
        host="h",
        endpoints=m.Endpoints("t", "d"),
        last=last,
        **given,
    )


FORMED = dict.fromkeys(("members", "with_state", "active", "gen_active"), (A, B, C))
"""Fields of a report after a generation of A, B and C."""


def prepared(who: MemberId, proposal: GenerationId, **facts: Any) -> m.Prepared:
    given = {
        "last": NO_GENERATION,
        "version": 0,
        "index": 0,
        "digest": "",
        "tail": ((0, ""),),
        "members": (),
        "with_state": (),
        "active": (),
        "benched": (),
        "gen_active": (),
        "accepted": NO_GENERATION,
        "started": 0,
        "has_state": False,
        "ready": True,
        "leaving": False,
        "stopped": False,
        "request": 0,
        **facts,
    }
    given |= {name: rows_of(given[name]) for name in SETS}
    return m.Prepared(id=proposal, member=who, **given)


def said_of(report: Status) -> list[Any]:
    return [*report.history, *report.conditions]


def beat(who: MemberId, at: GenerationId, version: int = 3, **facts: bool) -> m.Heartbeat:
    given: dict[str, Any] = {"leaving": False, "stopped": False, **facts}
    return m.Heartbeat(who, at, at, version, **given)


def kinds(messages: list[Struct]) -> list[str]:
    return [type(x).__name__ for x in messages]


def test_a_new_coordinator_does_not_start_over_while_a_pod_has_not_reported() -> None:
    """The rank with the weights is slow to report.

    `replicas` is 1, and a joiner registers first (R26).
    """
    desk = Desk(replicas=1)
    desk.pods(0, 1, trained=True)
    desk.agent(B)
    desk.say(register(B))
    assert "Prepare" not in kinds(desk.post(coord.Tick(), 5000))
    assert desk.state.phase is CoordinatorPhase.WAITING
    old = GenerationId(1, "z", 4)
    desk.agent(A)
    sent = desk.say(register(A, old, members=(A,), gen_active=(A,), version=7))
    assert kinds(sent).count("Prepare") == 2


def test_a_late_joiner_of_a_self_fed_job_without_steps_is_reported() -> None:
    """A self-fed script without a number of steps is not elastic.

    A rank that joins late starts its loop at step 0, which must not pass in silence.
    """
    for plan, starts_over in ((DataPlan(), True), (DataPlan(steps=9), False), (PLAN, False)):
        desk = Desk(replicas=1)
        desk.pods(0)
        at = desk.form(A, plan=plan)
        desk.say(beat(A, at))
        desk.pods(0, 1)
        desk.agent(B)
        desk.say(register(B, plan=plan))
        desk.post(coord.Tick(), 200)
        old = {"last": at, "version": 3, "members": (A,), "with_state": (A,), "active": (A,)}
        facts = {"gen_active": (A,), "has_state": True, **old}
        desk.say(prepared(A, desk.state.proposal, **facts))
        desk.say(prepared(B, desk.state.proposal))
        assert desk.state.gen is not None
        assert desk.state.gen.members == (A, B)
        report = status(desk.state)
        reasons = [x.reason for x in said_of(report)]
        assert reasons.count("ScriptStartsOver") == 2 * starts_over, plan
        if starts_over:
            [condition] = [x for x in report.conditions if x.reason == "ScriptStartsOver"]
            assert str(B) in condition.message
            assert "pl.steps(N)" in condition.message


def test_equal_seeds_of_self_fed_ranks_are_reported() -> None:
    for seeds, named in (((7, 7), True), ((7, 8), False), ((None, None), False)):
        desk = Desk(replicas=2)
        desk.pods(0, 1)
        for who, seed in zip((A, B), seeds, strict=True):
            desk.agent(who)
            desk.say(register(who, plan=DataPlan(), seed=seed))
        for who in (A, B):
            desk.say(prepared(who, desk.state.proposal))
        events = [x for x in status(desk.state).history if x.reason == "SeedsEqual"]
        assert bool(events) == named, seeds
        assert all("pl.rank()" in x.message for x in events)


def no_part(desk: Desk) -> list[str]:
    report = status(desk.state)
    return [x.message for x in said_of(report) if x.reason == NO_PART]


def test_a_script_without_a_call_of_init_for_a_minute_is_reported() -> None:
    """The script may compute on its own for days.

    The end of the job reports it as well, but that would be too late.
    """
    desk = Desk()
    desk.pods(0, 1)
    for who in (A, B):
        desk.post(coord.FromAgent(m.RankStarted(who, 4711)))
    due_ns = desk.state.wake_ns
    assert due_ns is not None, "nothing else would bring the coordinator to look"
    desk.post(coord.Tick(), 59_000)
    assert not no_part(desk)
    desk.now = due_ns
    desk.post(coord.Tick())
    [line, condition] = no_part(desk)
    assert "ranks 0.0#0 (pid 4711, since 00:00:00 UTC), 1.0#0 (pid 4711" in line
    assert "pl.init()" in line
    desk.post(coord.Tick(), 60_000)
    desk.say(register(A))
    [line, condition] = no_part(desk)
    assert "rank 1.0#0 (pid 4711, since 00:00:00 UTC) has" in condition, (
        "once in the log; the condition is of those that are left"
    )
    desk.say(register(B))
    assert no_part(desk) == [line]


def start(desk: Desk, *who: MemberId) -> None:
    """Let the agents of these ranks report that their processes have started."""
    desk.pods(*(each.slot for each in who))
    for each in who:
        desk.post(coord.FromAgent(m.AgentHello(each.slot, 0, f"node-{each.slot}", "", (), ())))
        desk.post(coord.FromAgent(m.RankStarted(each, 4711 + each.slot)))


def pass_time(desk: Desk, tenths: int, *beating: MemberId) -> None:
    """Let tenths of a second pass, in each of which the given ranks send a heartbeat."""
    for _ in range(tenths):
        desk.post(coord.Tick(), 100)
        for each in beating:
            desk.say(beat(each, NO_GENERATION, 0))


def test_a_rank_that_hangs_before_init_is_named_as_the_one_awaited() -> None:
    """Half of the ranks may not begin (R26).

    The condition once said that rank 1.0#0 was silent and not known dead, and hid the one that
    names the script.
    """
    desk = Desk()
    start(desk, A, B)
    desk.say(register(A))
    pass_time(desk, 100, A)
    assert desk.state.gen is None
    [waits] = [x for x in status(desk.state).conditions if x.type == "Degraded"]
    assert "rank 1.0#0 runs and has not registered yet, as pl.init() does" in waits.message
    pass_time(desk, 600, A)
    report = status(desk.state)
    last = [x for x in report.conditions if x.type == "Degraded"][-1]
    assert last.reason == NO_PART, "a status with room for one shows the last"
    assert (
        "rank 1.0#0 (pid 4712 on node-1, since 00:00:00 UTC) has run for a minute" in last.message
    )
    assert "the job waits for it" in last.message
    assert "py-spy dump --pid 4712" in last.message
    assert "spec.activeDeadlineSeconds" in last.message
    [row] = [row for row in report.ranks if row.member == B]
    assert row.host == "node-1"
    assert row.why == "has not called pl.init() since 00:00:00 UTC"
    assert desk.state.outcome is None, "it may be reading its data"
    pass_time(desk, 3_000, A)
    assert len([h for h in status(desk.state).history if h.reason == NO_PART]) == 1
    desk.say(register(B))
    assert desk.state.phase is CoordinatorPhase.PREPARING
    assert not [x for x in status(desk.state).conditions if x.reason == NO_PART]


def test_two_of_three_ranks_begin_while_the_third_hangs_before_init() -> None:
    desk = Desk(replicas=3)
    start(desk, A, B, C)
    for each in (A, B):
        desk.say(register(each))
    pass_time(desk, 3, A, B)
    for each in (A, B):
        desk.say(prepared(each, desk.state.proposal))
    assert desk.state.gen is not None
    assert desk.state.gen.members == (A, B)
    desk.post(coord.Tick(), 60_000)
    [_, condition] = no_part(desk)
    assert "rank 2.0#0 (pid 4713 on node-2" in condition
    assert "the job waits" not in condition


def test_a_process_counts_as_alive_since_its_agent_first_reported_it() -> None:
    desk = Desk(replicas=1)
    desk.pods(0)
    desk.agent(A)
    since_ns = desk.now
    desk.post(coord.Tick(), 500)
    desk.agent(A)
    assert desk.state.roster.rank(A).alive_ns == since_ns


def test_ranks_that_die_or_register_within_a_minute_are_not_reported() -> None:
    desk = Desk(replicas=1)
    desk.pods(0)
    desk.form(A)
    desk.pods(0, 1)
    desk.post(coord.FromAgent(m.RankStarted(B, 4711)))
    desk.post(coord.FromAgent(m.RankDead(B, -9, "killed", False)))
    for _ in range(300):
        desk.say(beat(A, desk.state.proposal), 300)
    assert not no_part(desk)


def test_samples_skipped_by_the_script_raise_a_condition() -> None:
    desk = Desk(replicas=1)
    desk.pods(0)
    desk.form(A)
    for skipped, holds in ((0.0, False), (96.0, True)):
        facts = {"log.samples_dropped.skipped": skipped}
        desk.say(m.RankFigures(A, 3, facts))
        conditions = [x for x in status(desk.state).conditions if x.reason == "SamplesSkipped"]
        assert bool(conditions) == holds
        assert all("96 samples" in x.message for x in conditions)


def test_state_is_not_lost_while_a_rank_that_has_it_may_be_alive() -> None:
    desk = Desk(replicas=3)
    desk.pods(0, 1, 2)
    at = desk.form(A, B, C)
    for who in (A, B, C):
        desk.say(beat(who, at))
    for who in (B, C):
        desk.post(coord.FromAgent(m.RankDead(who, -9, "killed", False)))
    desk.post(coord.FromAgent(m.RankGone(A)))
    for slot in (1, 2):
        desk.say(register(MemberId(slot, 0, 1)))
    assert desk.state.outcome is None, "rank 0 is only silent"
    assert desk.state.phase is CoordinatorPhase.WAITING


def test_a_job_starts_with_fewer_ranks_but_never_below_min_replicas() -> None:
    for least, starts in ((2, True), (3, False)):
        desk = Desk(replicas=4, min_replicas=least)
        desk.pods(0, 1)
        for who in (A, B):
            desk.agent(who)
            sent = desk.say(register(who))
        assert "Prepare" not in kinds(sent), "others may come while it settles"
        assert ("Prepare" in kinds(desk.post(coord.Tick(), SETTLE_MS))) is starts
    assert desk.state.waits == "2 of the 3 ranks that it needs are ready (minReplicas)"
    desk.pods(0, 1, 2)
    desk.agent(C)
    assert kinds(desk.say(register(C))).count("Prepare") == 3


def test_a_group_whose_ranks_all_died_restarts_together() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    for who in (A, B):
        desk.say(beat(who, at))
    for who in (A, B):
        desk.post(coord.FromAgent(m.RankDead(who, -9, "killed", False)))
    kept = Kept(at, 2, "d", 0, False)
    first, second = (MemberId(slot, 0, 1) for slot in (0, 1))
    desk.post(coord.Tick(), 10 * SETTLE_MS)
    assert "Prepare" not in kinds(desk.say(register(first, checkpoint=kept)))
    sent = desk.say(register(second, checkpoint=kept), SETTLE_MS // 2)
    assert kinds(sent).count("Prepare") == 2


def test_a_restart_of_a_dead_group_does_not_wait_forever_for_all_ranks() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    desk.say(beat(A, at))
    for who in (A, B):
        desk.post(coord.FromAgent(m.RankDead(who, -9, "killed", False)))
    desk.pods(0)
    again = MemberId(0, 0, 1)
    desk.say(register(again, checkpoint=Kept(at, 2, "d", 0, False)))
    assert desk.state.due_ns == desk.now + SETTLE_MS * MS
    assert kinds(desk.post(coord.Tick(), SETTLE_MS)) == ["Prepare"]


def test_a_lost_commit_is_sent_again_over_the_new_connection() -> None:
    """The rank has promised and waits, and no other rank would send it (R3)."""
    desk = Desk(replicas=1)
    desk.pods(0)
    desk.agent(A)
    desk.say(register(A))
    at = desk.state.proposal
    desk.say(prepared(A, at))
    desk.post(coord.FromAgent(m.RankGone(A)))
    sent = desk.say(register(A, NO_GENERATION, promise=at))
    assert [x.gen.id for x in sent if isinstance(x, m.Commit)] == [at]


def test_a_lost_prepare_is_sent_again_over_the_new_connection() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    for who in (A, B):
        desk.agent(who)
        desk.say(register(who))
    again = desk.say(register(B))
    assert [x.id for x in again if isinstance(x, m.Prepare)] == [desk.state.proposal]


def test_a_heartbeat_does_not_count_as_an_answer_to_prepare() -> None:
    """A rank with a stuck communication thread still sends heartbeats.

    It must not hold up the group forever.
    """
    desk = Desk(replicas=3)
    desk.pods(0, 1, 2)
    at = desk.form(A, B, C)
    desk.say(m.Complain(at, A, 0, "broken"))
    asked = desk.post(coord.Tick(), 250)
    assert kinds(asked).count("Prepare") == 3
    for _ in range(6):
        for who in (A, B, C):
            desk.say(beat(who, at), 30)
        for who in (A, B):
            desk.say(prepared(who, desk.state.proposal, last=at, has_state=True))
    assert desk.state.roster.rank(C).suspect
    desk.say(beat(C, at))
    assert desk.state.roster.rank(C).suspect, "only an answer is an answer"
    assert not desk.state.roster.rank(A).suspect


def test_ranks_that_wait_for_a_silent_peer_to_connect_do_not_become_suspect() -> None:
    """A peer that died between PREPARE and COMMIT is silent and holds up all others."""
    desk = Desk(replicas=3)
    desk.pods(0, 1, 2)
    for who in (A, B, C):
        desk.agent(who)
        desk.say(register(who))
    for who in (A, B, C):
        desk.say(prepared(who, desk.state.proposal))
    assert desk.state.phase is CoordinatorPhase.STARTING
    suspects = []
    for _ in range((FREEZE_MS + CONNECT_MS) // 30 - 1):
        for who in (A, B):
            desk.say(beat(who, desk.state.proposal), 30)
        suspects.append([m for m, s in sorted(desk.state.roster.ranks.items()) if s.suspect])
    assert suspects[0] == []
    assert suspects[-1] == [C], "A and B owe an answer too, and beat"


def test_a_rank_that_complained_owes_no_answer() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    for who in (A, B):
        desk.agent(who)
        desk.say(register(who))
    for who in (A, B):
        desk.say(prepared(who, desk.state.proposal))
    assert all(desk.state.owes_an_answer(x) for x in (A, B))
    desk.say(m.Complain(desk.state.proposal, A, 0, "no link"))
    assert [x for x in (A, B) if desk.state.owes_an_answer(x)] == [B]


def test_a_complaint_during_a_membership_change_starts_no_other_change() -> None:
    """All other ranks complain about a death, many of them after PREPARE was sent."""
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    desk.say(m.Complain(at, A, 0, "broken"))
    assert kinds(desk.post(coord.Tick(), 200)).count("Prepare") == 2
    proposal = desk.state.proposal
    assert kinds(desk.say(m.Complain(at, B, 0, "broken"))) == []
    desk.post(coord.Tick(), 500)
    assert desk.state.proposal == proposal


def test_the_delay_after_complaints_doubles_while_no_round_is_committed() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    waits = []
    for _ in range(5):
        desk.say(m.Complain(desk.state.proposal, A, 0, "no link"))
        assert desk.state.due_ns is not None
        wait = desk.state.due_ns - desk.now
        waits.append(round(wait / MS))
        while desk.state.phase is CoordinatorPhase.RUNNING:
            for who in (A, B):
                desk.say(beat(who, at, version=0), 20)
        for who in (A, B):
            desk.say(prepared(who, desk.state.proposal, last=at, gen_active=(A, B), has_state=True))
        for who in (A, B):
            desk.say(m.Started(desk.state.proposal, who, True))
    assert waits == [200, 400, 800, 1600, 3200]


def complaints(desk: Desk, at: GenerationId, count: int, round_: int = 0) -> None:
    """Let `count` generations of A and B fail after `round_` rounds."""
    for _ in range(count):
        desk.say(m.Complain(desk.state.proposal, A, round_, "no link"))
        while desk.state.phase is CoordinatorPhase.RUNNING:
            for who in (A, B):
                desk.say(beat(who, at, version=round_), 100)
        for who in (A, B):
            facts = {"last": at, "gen_active": (A, B), "has_state": True, "version": round_}
            desk.say(prepared(who, desk.state.proposal, **facts))
        for who in (A, B):
            desk.say(m.Started(desk.state.proposal, who, True))


@pytest.mark.long
def test_repeated_complaints_of_the_same_membership_fail_the_job() -> None:
    """An example is a backend that cannot access the memory of the gradients."""
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    complaints(desk, at, COMPLAINTS_MAX - 1)
    assert desk.state.outcome is None
    assert desk.now < 10 * 60_000 * MS
    desk.say(m.Complain(desk.state.proposal, A, 0, "no link"))
    assert desk.state.outcome is not None
    assert (desk.state.outcome.complete, desk.state.outcome.reason) == (False, "DataChannelFailed")
    assert "rank 0.0#0 lost its data channel: no link; in 20 memberships" in (
        desk.state.outcome.message
    )


@pytest.mark.long
def test_a_completed_round_resets_the_complaint_count() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    for version in range(3):
        complaints(desk, at, COMPLAINTS_MAX - 1, version)
    assert desk.state.outcome is None


def test_a_complaint_about_an_older_generation_is_ignored() -> None:
    """The older generation was already replaced (R4)."""
    desk, at = running()
    complaints(desk, at, 1)
    assert desk.state.proposal > at
    desk.say(m.Complain(at, A, 0, "no link"))
    assert desk.state.due_ns is None


@pytest.mark.long
def test_a_new_membership_resets_the_complaint_count() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    complaints(desk, at, COMPLAINTS_MAX - 1)
    desk.agent(C)
    desk.say(register(C))
    desk.post(coord.Tick(), 60_000)
    for who in (A, B):
        facts = {"last": at, "gen_active": (A, B), "has_state": True, "with_state": (A, B)}
        desk.say(prepared(who, desk.state.proposal, **facts))
    desk.say(prepared(C, desk.state.proposal))
    assert desk.state.gen is not None
    assert desk.state.gen.members == (A, B, C)
    desk.say(m.Complain(desk.state.proposal, A, 0, "no link"))
    assert desk.state.outcome is None


@pytest.mark.long
def test_a_complaint_after_the_release_does_not_fail_the_job() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    complaints(desk, at, COMPLAINTS_MAX - 1)
    for who in (A, B):
        desk.say(m.Stopped(desk.state.proposal, who, 3))
    assert desk.state.phase is CoordinatorPhase.RELEASED
    desk.say(m.Complain(desk.state.proposal, A, 0, "the peer has ended"))
    assert desk.state.outcome is None


def test_a_leaving_rank_waits_until_another_rank_has_the_state() -> None:
    """No generation is formed for it before that.

    Each new generation would restart the transfer of the state to the joiner.
    """
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    desk.state.roster.rank(B).current = False
    sent = desk.say(m.Leaving(at, A, False))
    assert "Prepare" not in kinds(sent)
    sent = desk.say(m.Started(at, B, True))
    assert "Prepare" in kinds(sent)


def test_a_connected_rank_is_not_dead_even_if_the_inventory_lacks_its_pod() -> None:
    """The inventory may be older than the pod.

    It counts only once the rank is silent (C4).
    """
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.form(A, B)
    desk.pods(0)
    assert not desk.state.roster.rank(B).dead
    desk.post(coord.FromAgent(m.RankGone(B)))
    assert desk.state.roster.rank(B).dead
    assert kinds(desk.say(register(B))) == ["Dismiss"]


def test_a_release_that_no_rank_confirmed_is_not_a_success() -> None:
    """The last rank reports the stop round and is lost before it is released (C1)."""
    desk = Desk(replicas=1)
    desk.pods(0)
    at = desk.form(A)
    desk.post(coord.FromAgent(m.RankGone(A)))
    desk.say(m.Stopped(at, A, 9))
    assert desk.state.released is None
    desk.agent(A)
    sent = desk.say(register(A, at, version=9))
    assert "Release" in kinds(sent)
    desk.post(coord.FromAgent(m.RankGone(A)))
    desk.pods()
    assert desk.state.outcome is not None
    assert desk.state.outcome.reason == "StateLost"


def test_a_released_rank_that_exits_with_code_0_completes_the_job() -> None:
    desk = Desk(replicas=1)
    desk.pods(0)
    at = desk.form(A)
    assert "Release" in kinds(desk.say(m.Stopped(at, A, 9)))
    desk.post(coord.FromAgent(m.RankDead(A, 0, "", False, (at, 9))))
    assert desk.state.outcome is not None
    assert desk.state.outcome.complete


def released() -> tuple[Desk, GenerationId]:
    """Return a desk whose two ranks were released with version 9; neither has ended."""
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    desk.say(m.Stopped(at, A, 9))
    assert "Release" in kinds(desk.say(m.Stopped(at, B, 9)))
    return desk, at


AFTER_THE_RELEASE: dict[str, Event] = {
    "killed": coord.FromAgent(m.RankDead(B, -9, "signal 9 (SIGKILL)", False, (GEN_1, 9))),
    "killed before it heard of it": coord.FromAgent(m.RankDead(B, -9, "signal 9", True)),
    "started too late, and failed": coord.FromAgent(m.RankDead(B, 1, "ImportError", True)),
    "its pod failed": coord.FromAgent(m.AgentDone(1, 0, "failed", "rank 1.0: exit code 2")),
    "its engine broke": coord.FromRank(m.Fatal(B, "RuntimeBroken", "no space")),
}


@pytest.mark.parametrize("event", AFTER_THE_RELEASE.values(), ids=AFTER_THE_RELEASE)
def test_a_failure_after_the_release_does_not_change_the_outcome(event: Event) -> None:
    """A complete job stays complete (R17, C1)."""
    desk, at = released()
    desk.post(event)
    assert desk.state.outcome is None
    for each in (A, B):
        desk.post(coord.FromAgent(m.RankDead(each, 0, "", False, (at, 9))))
    assert desk.state.outcome is not None
    assert desk.state.outcome.complete, desk.state.outcome


def test_a_rank_that_reconnects_after_the_release_is_released_again() -> None:
    """The rank may have been disconnected when the others were released (R17)."""
    desk, at = released()
    assert m.Release(at, 9) in desk.say(register(A, last=at))


def test_a_stopped_job_is_not_reported_as_complete() -> None:
    """After Ctrl-C the last lines once said so, right before "stopped by the user"."""
    desk = Desk(replicas=1)
    desk.pods(0)
    at = desk.form(A)
    desk.post(coord.SetTargets(m.Targets(stop=True)))
    desk.say(m.Stopped(at, A, 9))
    desk.post(coord.FromAgent(m.RankDead(A, 0, "", False, (at, 9))))
    assert desk.state.outcome is not None
    assert desk.state.outcome.complete, "all that was made is in the weights"
    events = desk.coordinator.status(desk.now).history[-2:]
    assert [h.reason for h in events] == ["Released", "Stopped"]
    assert "complete" not in " ".join(h.message for h in events)


def released_and_gone() -> Desk:
    """Return a desk whose two ranks have ended; the agent of A reports it, that of B is silent."""
    desk, at = released()
    desk.post(coord.FromAgent(m.RankDead(A, 0, "", False, (at, 9))))
    desk.post(coord.FromAgent(m.RankGone(B)))
    assert desk.state.outcome is None
    return desk


def test_a_silent_agent_after_the_release_does_not_delay_the_end() -> None:
    """Only the silent agent could report that its rank has ended.

    The other ranks have the complete result (R17).
    """
    desk = released_and_gone()
    due_ns = desk.state.wake_ns
    assert due_ns is not None, "nothing else would bring the coordinator to look"
    desk.post(coord.Tick(), FREEZE_MS // 2)
    assert desk.state.outcome is None
    desk.post(coord.Tick(), FREEZE_MS // 2)
    assert desk.state.outcome is not None
    assert desk.state.outcome.complete
    report = desk.coordinator.status(desk.now)
    [line] = [h.message for h in report.history if h.reason == "AgentSilent"]
    assert "replica 1" in line
    assert report.silent == (1,)


def test_after_the_release_an_agent_with_heartbeats_is_awaited() -> None:
    desk = released_and_gone()
    for _ in range(20):
        desk.post(coord.FromAgent(m.PodBeat(1, 0)), FREEZE_MS // 2)
    assert desk.state.outcome is None
    assert not desk.coordinator.status(desk.now).silent


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("required", [False, True])
def test_a_failed_checkpoint_fails_the_job_only_if_checkpoints_are_required(
    *, required: bool, released: bool
) -> None:
    """A run once exited with code 0 although all checkpoints failed on a full disk.

    Even the one of the end had failed.
    """
    desk = Desk(replicas=1, checkpoint_required=required)
    desk.pods(0)
    at = desk.form(A)
    if released:
        desk.say(m.Stopped(at, A, 9))
    desk.say(m.Saved(A, 9, "no space left on device"))
    outcome = desk.state.outcome
    [event] = [h for h in status(desk.state).history if h.reason == "CheckpointFailed"]
    assert "rank 0.0#0 could not write the checkpoint of version 9: no space left" in event.message
    if required:
        assert outcome is not None
        assert (outcome.complete, outcome.reason) == (False, "CheckpointFailed")
        assert "spec.checkpoint.required" in outcome.hint
        return
    assert outcome is None
    if released:
        desk.post(coord.FromAgent(m.RankDead(A, 0, "", False, (at, 9))))
        assert desk.state.outcome is not None
        assert desk.state.outcome.complete
    report = status(desk.state)
    assert [x.reason for x in report.conditions if x.type == "Degraded"] == ["CheckpointFailed"]
    report = replace(report, version=9, conditions=())  # An ended job has no conditions.
    [warning] = [line for line in summary(report, Timeline()) if "WARNING" in line]
    assert "no space left on device" in warning
    assert "spec.checkpoint.required" in warning


def test_a_script_that_delays_the_end_of_a_complete_job_is_reported_once() -> None:
    """The script loops forever after the training; the run once reported nothing about it."""
    desk, at = released()
    desk.post(coord.FromAgent(m.RankDead(A, 0, "", False, (at, 9))))
    reason = "ScriptStillRuns"
    for _ in range(60):
        desk.post(coord.FromAgent(m.PodBeat(1, 0)), FREEZE_MS // 2)
        desk.say(beat(B, at))
    report = desk.coordinator.status(desk.now)
    [line] = [h.message for h in report.history if h.reason == reason]
    assert f"rank {B} on " in line
    assert f"rank {A}" not in line
    assert "600 s" in line
    assert "spec.finishDeadlineSeconds" in line
    assert [x.message for x in report.conditions if x.reason == reason] == [line]
    desk.post(coord.FromAgent(m.RankDead(B, -9, "its script was cut short", False, (at, 9))))
    assert desk.state.outcome is not None
    assert desk.state.outcome.complete
    report = desk.coordinator.status(desk.now)
    assert [x for x in report.conditions if x.reason == reason] == []
    assert [h.message for h in report.history if h.reason == "ScriptCutShort"]


def without_rank_0() -> tuple[Desk, GenerationId]:
    """Return a desk with a job of a script whose rank 0 is dead while rank 1 trains."""
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.form(A, B, plan=DataPlan(slots=2))
    desk.post(coord.FromAgent(m.RankDead(A, -9, "signal 9 (SIGKILL)", False)))
    desk.pods(1)
    desk.say(prepared_again(B, desk.state.proposal))
    at = desk.state.proposal
    desk.say(m.Started(at, B, True))
    return desk, at


def prepared_again(who: MemberId, proposal: GenerationId) -> m.Prepared:
    """Return the report of a rank that was active with all others and has made three rounds."""
    both = dict.fromkeys(("members", "with_state", "active", "gen_active"), (A, B))
    first = proposal._replace(counter=1)
    return prepared(who, proposal, last=first, version=3, has_state=True, **both)


def pass_s(desk: Desk, at: GenerationId, seconds: int, *, done: bool) -> None:
    """Let seconds pass in which rank 1 is heard."""
    for _ in range(seconds * 5):
        desk.say(beat(B, at, done=done), 200)
        desk.post(coord.Tick(), 0)


@pytest.mark.long
def test_a_job_without_rank_0_says_that_it_waits_and_fails_when_nobody_comes() -> None:
    """The other scripts have ended, and nothing is saved: this must not wait for ever (S14)."""
    desk, at = without_rank_0()
    pass_s(desk, at, 5, done=False)
    assert desk.state.without_slot_0_ns is None
    pass_s(desk, at, 5, done=True)
    report = desk.coordinator.status(desk.now)
    [line] = [h.message for h in report.history if h.reason == "WaitingForRank0"]
    assert "1800 s" in line
    assert [x.message for x in report.conditions if x.reason == "WaitingForRank0"] == [line]
    pass_s(desk, at, 1800, done=True)
    assert desk.state.outcome is not None
    assert (desk.state.outcome.complete, desk.state.outcome.reason) == (False, "Rank0Lost")
    assert "spec.stepDeadlineSeconds" in desk.state.outcome.message


def test_a_job_whose_rank_0_is_being_replaced_waits_for_it() -> None:
    desk, at = without_rank_0()
    pass_s(desk, at, 5, done=True)
    desk.pods(0, 1)
    again = MemberId(0, 0, ATTEMPT_STRIDE)
    desk.post(coord.FromAgent(m.AgentHello(0, 1, "h", "", (again,), ())))
    desk.post(coord.FromAgent(m.RankStarted(again, 7)))
    pass_s(desk, at, 1, done=True)
    report = desk.coordinator.status(desk.now)
    assert not [x for x in report.conditions if x.reason == "WaitingForRank0"]
    assert desk.state.without_slot_0_ns is None


def test_a_script_that_ends_soon_after_the_release_is_not_reported() -> None:
    desk, at = released()
    for who in (A, B):
        desk.post(coord.FromAgent(m.RankDead(who, 0, "", False, (at, 9))), 2000)
    report = desk.coordinator.status(desk.now)
    assert not [h for h in report.history if h.reason == "ScriptStillRuns"]


def test_a_released_rank_is_awaited_as_long_as_its_agent_sends_heartbeats() -> None:
    desk, at = released()
    desk.post(coord.FromAgent(m.RankDead(A, 0, "", False, (at, 9))))
    for _ in range(20):
        desk.say(beat(B, at), FREEZE_MS // 2)
    assert desk.state.outcome is None
    desk.post(coord.Tick(), FREEZE_MS)
    assert desk.state.outcome is not None
    assert desk.state.outcome.complete


def frozen_agent() -> tuple[Desk, GenerationId]:
    """Return a desk of three pods of which one is silent: its agent and so its rank."""
    desk = Desk(replicas=3)
    desk.pods(0, 1, 2)
    at = desk.form(A, B, C)
    for _ in range(2):
        for who in (A, B, C):
            desk.say(beat(who, at), FREEZE_MS // 6)
    sent: list[Struct] = []
    while not desk.state.roster.rank(C).suspect:
        for who in (A, B):
            sent += desk.say(beat(who, at), FREEZE_MS // 6)
    all_three = (A, B, C)
    state = {"members": all_three, "with_state": all_three, "active": all_three}
    for who in (A, B):
        report = {**state, "gen_active": all_three, "last": at, "has_state": True, "version": 3}
        sent += desk.say(prepared(who, desk.state.proposal, **report))
    for who in (A, B):
        sent += desk.say(m.Started(desk.state.proposal, who, True))
    assert desk.state.phase is CoordinatorPhase.RUNNING, "the others go on"
    assert not [x for x in sent if isinstance(x, m.KillRank)], "nobody could hear that C lives"
    return desk, at


def test_the_ranks_of_a_silent_agent_recover_when_it_returns() -> None:
    """An agent that was stopped for a while must not kill its ranks when it continues (R43)."""
    desk, at = frozen_agent()
    sent = desk.say(beat(C, at))
    assert not [x for x in sent if isinstance(x, m.KillRank)]
    assert not desk.state.roster.rank(C).suspect


def test_a_rank_still_silent_after_its_agent_returned_is_killed() -> None:
    """Heartbeats of an agent must not hide a rank that sends none (R43)."""
    desk, at = frozen_agent()
    sent: list[Struct] = []
    for _ in range(6):
        assert not [x for x in sent if isinstance(x, m.KillRank)]
        for who in (A, B):
            sent += desk.say(beat(who, at), FREEZE_MS // 12)
        sent += desk.post(coord.FromAgent(m.PodBeat(2, 0)))
    for _ in range(3):
        sent += desk.post(coord.FromAgent(m.PodBeat(2, 0)), FREEZE_MS // 12)
    assert [x.member for x in sent if isinstance(x, m.KillRank)] == [C]


def test_a_rank_back_after_the_release_is_released_or_killed_if_stuck() -> None:
    """The release was sent only to the ranks that were connected (R17)."""
    desk, at = frozen_agent()
    for who in (A, B):
        desk.say(m.Stopped(desk.state.proposal, who, 9))
    assert desk.state.phase is CoordinatorPhase.RELEASED
    sent = desk.say(at_work(C, at, 0))
    assert kinds(sent) == ["Release"]
    sent = desk.say(at_work(C, at, FREEZE_MS))
    assert kinds(sent) == ["KillRank"]


def test_a_script_stuck_in_a_batch_is_reported_once_with_its_line() -> None:
    """All other ranks once waited, and nothing said for which rank."""
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    away = m.Away(3600.0, "train.py", 18)
    for _ in range(3):
        desk.say(m.Heartbeat(B, at, at, 7, active=True, away=away), 30)
        report = desk.coordinator.status(desk.now)
        [line] = [h.message for h in report.history if h.reason == "ScriptStuck"]
        assert f"the script of rank {B} on " in line
        assert "since 01:00:00 UTC (train.py, line 18)" in line
        assert "1800 s (spec.stepDeadlineSeconds)" in line
        assert [x.message for x in report.conditions if x.reason == "ScriptStuck"] == [line]
    desk.say(m.Heartbeat(B, at, at, 8, active=True), 30)
    report = desk.coordinator.status(desk.now)
    assert not [x for x in report.conditions if x.reason == "ScriptStuck"]


def test_a_crash_before_the_first_round_fails_the_job() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.post(coord.FromAgent(m.RankStarted(A, 4711)))
    desk.post(coord.FromAgent(m.RankDead(A, -11, "signal 11 (SIGSEGV)", True)))
    assert desk.state.outcome is not None
    assert desk.state.outcome.reason == "ScriptFailed"
    assert "signal 11 (SIGSEGV)" in desk.state.outcome.message


def test_the_common_values_of_a_pod_heartbeat_apply_to_all_ranks_it_lists() -> None:
    """A rank that is heard but not listed has the values of the pod.

    Its other values are those that it reported last (R43).
    """
    desk = Desk(replicas=1)
    desk.pods(0)
    at = desk.form(A)
    desk.say(m.Heartbeat(A, at, at, 7, doing=m.Doing(0, -1, 40), active=True))
    desk.post(coord.FromAgent(m.PodBeat(0, 0, ((0, 0),), at, at, 9)), 30)
    rank = desk.state.roster.rank(A)
    assert (rank.version, rank.heard_ns, desk.state.version) == (9, desk.now, 9)
    assert (rank.beat.active, rank.beat.doing) == (True, m.Doing(0, -1, 40))


def test_ranks_of_a_disconnected_pod_are_absent_until_they_register_again() -> None:
    """The greeting over the next connection lists the ranks that can be asked (R43)."""
    neighbour = MemberId(0, 1, 0)
    desk = Desk(replicas=1)
    desk.pods(0)
    hello = m.AgentHello(0, 0, "h", "", (A, neighbour), ())
    desk.post(coord.FromAgent(hello))
    desk.say(register(A))
    desk.say(register(neighbour))
    assert [s.member for s in desk.state.roster.present()] == [A, neighbour]
    desk.post(coord.AgentGone(0, 0))
    assert desk.state.roster.present() == []
    desk.post(coord.FromAgent(replace(hello, registers=(register(A),))))
    assert [s.member for s in desk.state.roster.present()] == [A]


def test_a_greeting_over_a_new_connection_replaces_the_old_registrations() -> None:
    """The end of the old connection may be noticed after the new one opens, or never."""
    desk = Desk(replicas=1)
    desk.pods(0)
    desk.form(A)
    desk.agent(A)
    assert desk.state.roster.present() == [], "it has not introduced itself again"


def test_a_script_that_fails_after_its_release_is_reported() -> None:
    """The error is in the script's own use of the model, and no other report would name it."""
    desk, at = released()
    desk.post(coord.FromAgent(m.RankDead(B, 1, "KeyError", False, (at, 9))))
    assert desk.state.outcome is not None
    assert desk.state.outcome.reason == "ScriptFailed"


def test_no_process_is_started_after_the_release() -> None:
    """Agents are told at the release, or when they connect later (R17)."""
    desk, _ = released()
    effects = [e for e in desk.state.effects if isinstance(e, coord.ToAgent)]
    assert [(e.slot, e.message) for e in effects] == [(s, m.Closing()) for s in (0, 1)]
    late = coord.FromAgent(m.AgentHello(1, 1, "h", "", (member(1)._replace(attempt=1000),), ()))
    assert desk.post(late) == [m.Closing()]


def test_a_membership_change_names_the_death_not_the_peers_lost_channel() -> None:
    """The complaint of a peer arrives before the report of the dead rank's agent."""
    desk = Desk(replicas=3)
    desk.pods(0, 1, 2)
    generation = desk.form(A, B, C)
    desk.say(m.Complain(generation, C, 1, "Connection reset by peer", B))
    desk.post(coord.FromAgent(m.RankDead(B, -9, "signal 9 (SIGKILL)", True)), 50)
    desk.post(coord.Tick(), 200)
    for who in (A, C):
        desk.say(prepared(who, desk.state.proposal, last=generation, has_state=True, **FORMED))
    [*_, change] = status(desk.state).changes
    assert change.why == f"rank {B}: signal 9 (SIGKILL)"
    formed = [one for one in desk.state.history.entries if one.reason == "GenerationFormed"]
    assert formed[-1].facts["why"] == change.why


def test_a_lost_channel_without_a_death_is_named_as_the_cause() -> None:
    desk = Desk(replicas=3)
    desk.pods(0, 1, 2)
    generation = desk.form(A, B, C)
    desk.say(m.Complain(generation, C, 1, "Connection reset by peer", B))
    desk.post(coord.Tick(), 250)
    for who in (A, B, C):
        desk.say(prepared(who, desk.state.proposal, last=generation, has_state=True, **FORMED))
    [*_, change] = status(desk.state).changes
    assert change.why == f"rank {C} lost its data channel (rank {B}): Connection reset by peer"


def rule(action: FailureAction, *codes: int) -> FailureRuleSettings:
    return FailureRuleSettings(action, codes, ())


def outcome_after(
    deaths: int, code: int, *rules: FailureRuleSettings, trained: bool = True
) -> str | None:
    """Return the outcome of a job with backoffLimit 1 in which one rank dies `deaths` times."""
    desk = Desk(rules=rules, backoff_limit=1)
    desk.pods(0, 1)
    if trained:
        desk.form(A, B)
        desk.state.had_state = True
    else:
        desk.agent(B)
    for n in range(deaths):
        who = B._replace(attempt=B.attempt + n)
        desk.post(coord.FromAgent(m.RankStarted(who, 7)))
        desk.post(coord.FromAgent(m.RankDead(who, code, f"exit code {code}", True)))
    return desk.state.outcome.reason if desk.state.outcome else None


@pytest.mark.parametrize(
    ("code", "rules", "trained", "reason"),
    [
        (75, [], True, "BackoffLimitExceeded"),
        (75, [rule(FailureAction.IGNORE, 75)], True, None),
        (-9, [rule(FailureAction.IGNORE, 137)], True, None),
        (75, [rule(FailureAction.COUNT, 75)], True, "BackoffLimitExceeded"),
        (75, [rule(FailureAction.FAIL_JOB, 75)], True, "FailurePolicy"),
        (75, [rule(FailureAction.IGNORE, 75), rule(FailureAction.FAIL_JOB, 75)], True, None),
        (75, [], False, "ScriptFailed"),
        (75, [rule(FailureAction.IGNORE, 75)], False, None),
        (75, [rule(FailureAction.COUNT, 75)], False, "BackoffLimitExceeded"),
    ],
)
def test_failure_rules_decide_the_outcome_after_deaths(
    code: int, rules: list[FailureRuleSettings], trained: bool, reason: str | None
) -> None:
    assert outcome_after(2, code, *rules, trained=trained) == reason


def test_a_fail_job_rule_fails_the_job_at_the_first_death() -> None:
    assert outcome_after(1, 42, rule(FailureAction.FAIL_JOB, 42)) == "FailurePolicy"


def test_no_rule_fails_a_job_after_its_last_round() -> None:
    desk = Desk(rules=(rule(FailureAction.FAIL_JOB, 137),))
    desk.pods(0, 1)
    generation = desk.form(A, B)
    desk.say(m.Stopped(generation, A, 9))
    desk.post(coord.FromAgent(m.RankDead(B, -9, "signal 9", True)))
    assert desk.state.outcome is None


def test_restarts_are_summed_over_all_places() -> None:
    desk = Desk()
    desk.pods(0, 1)
    desk.form(A, B)
    assert status(desk.state).restarts == 0
    third, next_pod = B._replace(attempt=2), A._replace(attempt=ATTEMPT_STRIDE + 1)
    for who in (B._replace(attempt=1), third, next_pod):
        desk.post(coord.FromAgent(m.RankStarted(who, 7)))
    assert status(desk.state).restarts == 3
    desk.post(coord.FromAgent(m.RankDead(third, -9, "killed", True)))
    assert status(desk.state).restarts == 3


def test_the_reason_for_the_transport_is_reported_with_started() -> None:
    desk = Desk()
    desk.pods(0, 1)
    generation = desk.form(A, B)
    assert status(desk.state).transport_why == ""
    desk.say(m.Started(generation, B, True, "mpi:ring 40 us at 4096 B; next: gloo 90 us"))
    desk.say(m.Started(generation, A, True))
    assert status(desk.state).transport_why == "mpi:ring 40 us at 4096 B; next: gloo 90 us"


def test_a_superseded_coordinator_sends_no_more_messages() -> None:
    desk = Desk(replicas=1)
    desk.pods(0)
    desk.form(A)
    later = GenerationId(9, "z", 1)
    desk.say(beat(A, later))
    assert desk.state.phase is CoordinatorPhase.ENDED
    assert desk.say(register(A, later)) == []


def test_the_end_of_the_job_shuts_down_connected_agents_and_is_reported() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.form(A, B)
    desk.post(coord.AgentGone(1, 0))
    effects = desk.coordinator.handle(desk.now, coord.FromRank(m.Fatal(A, "ScriptFailed", "why")))
    shutdowns = [e.slot for e in effects if isinstance(e, coord.ToAgent)]
    assert shutdowns == [0], "the other one is not connected"
    assert [e.outcome.reason for e in effects if isinstance(e, coord.JobEnded)] == ["ScriptFailed"]


def test_a_report_for_an_older_proposal_is_ignored() -> None:
    """An old report does not say what its rank has promised since (R4)."""
    desk, at = running()
    desk.say(m.Complain(at, A, 0, "no link"))
    while desk.state.phase is CoordinatorPhase.RUNNING:
        for who in (A, B):
            desk.say(beat(who, at, version=0), 20)
    desk.say(prepared(A, at))
    assert A not in desk.state.reports
    desk.say(prepared(A, desk.state.proposal))
    assert A in desk.state.reports


def test_the_first_proposal_is_above_the_generation_of_the_checkpoint() -> None:
    """Another coordinator made the generations of the checkpoint (R1)."""
    desk = Desk(replicas=1)
    desk.pods(0)
    desk.agent(A)
    desk.say(register(A, checkpoint=Kept(GenerationId(5, "b", 3), 2, "d")))
    assert desk.state.proposal > GenerationId(6, "", 0)


def test_a_pod_that_connects_after_the_end_is_shut_down() -> None:
    desk = Desk(replicas=1)
    desk.pods(0)
    desk.form(A)
    desk.say(m.Fatal(A, "ScriptFailed", "it raised"))
    hello = m.AgentHello(1, 0, "h", "", (B,), ())
    assert desk.post(coord.FromAgent(hello)) == [m.Shutdown("ScriptFailed")]


def test_a_restarted_coordinator_drains_no_pod_before_it_knows_the_size() -> None:
    """The job file still says 2 replicas.

    The job was scaled to 3 under an earlier coordinator.
    """
    desk = Desk(replicas=2)
    sent: list[Struct] = []
    for each in (A, B, C):
        sent += desk.post(coord.FromAgent(m.AgentHello(each.slot, 0, "h", "", (each,), ())))
    desk.pods(0, 1, 2)
    assert "DrainPod" not in kinds(sent)
    status = desk.coordinator.status(desk.now)
    assert not status.has_targets
    assert "Resizing" not in {c.type for c in status.conditions}
    assert "DrainPod" not in kinds(desk.post(coord.SetTargets(m.Targets(replicas=3))))
    assert "DrainPod" in kinds(desk.post(coord.SetTargets(m.Targets(replicas=2))))


def test_a_pause_of_the_coordinator_makes_no_rank_suspect() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.form(A, B)
    desk.post(coord.Tick(), 20 * FREEZE_MS)
    assert not any(s.suspect for s in desk.state.roster.ranks.values())


def test_an_inventory_older_than_a_pod_does_not_make_it_dead() -> None:
    """The pod reports before an inventory lists it.

    It is dead once a later inventory no longer lists it.
    """
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.form(A, B)
    desk.agent(C)
    desk.post(coord.Tick())
    assert not desk.state.roster.is_dead(C)
    desk.pods(0, 1, C.slot)
    assert not desk.state.roster.is_dead(C)
    desk.pods(0, 1)
    assert desk.state.roster.is_dead(C)


def resizing_of(desk: Desk) -> list[str]:
    return [c.message for c in status(desk.state).conditions if c.type == "Resizing"]


def test_a_killed_pod_does_not_count_as_a_running_replica() -> None:
    """A killed pod never reports its end; only the inventory shows it."""
    desk, _ = running()
    desk.post(coord.SetTargets(m.Targets(replicas=2)))
    assert resizing_of(desk) == []
    desk.post(coord.AgentGone(1, 0))
    desk.pods(0)
    assert resizing_of(desk) == ["1 replicas run, 2 are wanted"]
    desk.post(coord.SetInventory(m.Inventory(3, ((0, 0), (1, 1)))))
    assert resizing_of(desk) == []


def test_a_pod_whose_agent_reported_counts_before_the_inventory_lists_it() -> None:
    desk, _ = running()
    desk.post(coord.SetTargets(m.Targets(replicas=3)))
    desk.agent(C)
    assert resizing_of(desk) == []


def test_pods_that_are_gone_are_eventually_forgotten() -> None:
    desk, _ = running()
    roster = desk.state.roster
    many = tuple((1, attempt) for attempt in range(1, 30))
    for number, pod in enumerate(many):
        desk.post(coord.SetInventory(m.Inventory(number + 2, ((0, 0), pod))))
    roster.forget_dead({A}, limit=4)
    assert set(roster.pods) == {(0, 0), (1, 0), *many[-5:]}


def at_work(who: MemberId, at: GenerationId, for_ms: int, **facts: int) -> m.Heartbeat:
    doing = m.Doing(for_ms, round=7, **facts)
    return m.Heartbeat(who, at, at, 0, doing=doing)


def running() -> tuple[Desk, GenerationId]:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    return desk, desk.form(A, B)


@pytest.mark.parametrize(
    ("facts", "bound_ms"),
    [
        ({}, FREEZE_MS),
        ({"usual_ms": 30}, FREEZE_MS + 300),
        ({"payload_bytes": 10**7}, FREEZE_MS + 2000),
        ({"usual_ms": 300, "payload_bytes": 10**7}, FREEZE_MS + 3000),
    ],
)
def test_a_round_past_its_time_limit_starts_a_new_generation(
    facts: dict[str, int], bound_ms: int
) -> None:
    """The limit leaves time for a healthy reduction, even the first one of a large model (R35)."""
    desk, at = running()
    assert desk.say(at_work(A, at, bound_ms - 1, **facts)) == []
    sent = desk.say(at_work(A, at, bound_ms, **facts))
    assert kinds(sent) == ["Prepare", "Prepare"]
    assert "rank 0.0#0 has been in the reduction of round 7 for" in desk.state.why


def test_a_stuck_rank_is_found_among_working_ranks() -> None:
    desk, at = running()
    assert desk.say(at_work(A, at, 1)) == []
    assert "Prepare" in kinds(desk.say(at_work(B, at, FREEZE_MS)))
    assert "rank 1.0#0 has been in the reduction" in desk.state.why


def test_a_stuck_rank_that_does_not_answer_is_killed_by_its_agent() -> None:
    desk, at = running()
    desk.say(at_work(B, at, FREEZE_MS))
    desk.say(prepared(A, desk.state.proposal))
    orders: list[Struct] = []
    for beats in range(1, 6):
        orders += desk.say(at_work(B, at, (1 + beats) * FREEZE_MS), FREEZE_MS // 4)
        orders += desk.say(at_work(A, desk.state.proposal, 0))
    assert [o.member for o in orders if isinstance(o, m.KillRank)] == [B]


def test_the_time_limit_of_a_round_doubles_with_each_generation_without_one() -> None:
    """No rank is stuck; the links are only slower than estimated."""
    desk, at = running()
    for doublings in range(4):
        assert desk.say(at_work(A, at, (FREEZE_MS << doublings) - 1)) == [], doublings
        assert "Prepare" in kinds(desk.say(at_work(A, at, FREEZE_MS << doublings)))
        at = desk.state.proposal
        for each in (A, B):
            desk.say(prepared(each, at))
        for each in (A, B):
            desk.say(m.Started(at, each, True))


def test_a_report_from_before_the_last_promise_is_ignored() -> None:
    desk, at = running()
    assert desk.say(at_work(A, NO_GENERATION, 10 * FREEZE_MS)) == []
    assert kinds(desk.say(at_work(A, at, 10 * FREEZE_MS))) != []


def test_a_rank_stuck_before_its_first_round_is_killed_once() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.agent(A)
    desk.say(register(A, ready=False))
    assert kinds(desk.say(at_work(A, NO_GENERATION, FREEZE_MS - 1))) == []
    assert kinds(desk.say(at_work(A, NO_GENERATION, FREEZE_MS))) == ["KillRank"]
    assert kinds(desk.say(at_work(A, NO_GENERATION, FREEZE_MS + 200))) == [], "asked once"


def test_a_rank_stuck_after_the_release_is_killed_and_the_job_completes() -> None:
    desk, at = released()
    sent = desk.say(at_work(B, at, FREEZE_MS))
    assert kinds(sent) == ["KillRank"]
    for each, code in ((A, 0), (B, -9)):
        evidence = (at, 9) if each == A else None
        desk.post(coord.FromAgent(m.RankDead(each, code, "", False, evidence)))
    assert desk.state.outcome is not None
    assert desk.state.outcome.complete


def test_the_status_contains_figures_of_each_rank_and_those_of_the_log_once() -> None:
    """Each rank reports a share for every rank.

    With those in every row, the status would grow with the square of the number of ranks.
    """
    desk = Desk()
    desk.pods(0, 1)
    at = desk.form(A, B)
    facts = pack_log(LogStatus(gradients=7, shares={str(who): 1.0 for who in (A, B)}))
    for who in (A, B):
        desk.say(m.RankFigures(who, 3, facts))
        desk.say(m.Heartbeat(who, at, at, 3, step_s=0.5))
    report = status(desk.state)
    assert [rank.facts for rank in report.ranks] == [{Fact.STEP_S: 0.5}] * 2
    assert (report.log.gradients, len(report.log.shares)) == (7, 2)


def test_heartbeats_are_rarer_and_silence_is_tolerated_longer_with_many_ranks() -> None:
    """The 1,024 ranks send heartbeats every 4 s.

    With a limit of 400 ms of silence, all of them would become suspect (R42).
    """
    desk = Desk(replicas=1024)
    sent = desk.post(coord.FromAgent(m.AgentHello(A.slot, 0, "h", "", (A,), ())))
    assert m.BeatEvery(4000, 7) in sent
    desk.say(register(A))
    for _ in range(19):
        desk.post(coord.Tick(), ms=1000)
    assert not desk.state.roster.rank(A).suspect
    desk.post(coord.Tick(), ms=1_001)
    assert desk.state.roster.rank(A).suspect == "silent for 20.0 s"


def test_agents_receive_a_new_heartbeat_interval_when_the_job_is_scaled() -> None:
    desk = Desk(replicas=2)
    sent = desk.post(coord.FromAgent(m.AgentHello(A.slot, 0, "h", "", (A,), ())))
    assert not any(isinstance(x, m.BeatEvery) for x in sent)
    sent = desk.post(coord.SetTargets(m.Targets(replicas=128)))
    assert [x for x in sent if isinstance(x, m.BeatEvery)] == [m.BeatEvery(500, 7)]
    sent = desk.post(coord.SetTargets(m.Targets(replicas=2)))
    assert m.BeatEvery(200, 1) in sent


def test_log_figures_come_from_the_rank_that_reports_them_now() -> None:
    """Figures of a rank that no longer reports the log are older."""
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    desk.say(m.RankFigures(A, 5, {"log.gradients": 10.0}))
    desk.say(m.RankFigures(B, 9, {"wait_seconds_total": 1.0}))
    assert status(desk.state).log.gradients == 10
    desk.say(m.RankFigures(B, 10, {"log.gradients": 20.0}))
    desk.say(beat(A, at, version=11))
    assert status(desk.state).log.gradients == 20


def test_log_figures_of_a_dead_rank_are_kept_until_newer_ones_arrive() -> None:
    """A job that failed after 66 rounds once showed 0 applied samples.

    The rank that reported the log had died.
    """
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.form(A, B)
    desk.say(m.RankFigures(A, 66, {"log.gradients": 132.0}))
    desk.post(coord.FromAgent(m.RankDead(A, -9, "killed", False)))
    desk.form(B)
    assert status(desk.state).log.gradients == 132
    desk.say(m.RankFigures(B, 67, {"log.gradients": 133.0}))
    assert status(desk.state).log.gradients == 133


def test_the_first_generation_starts_at_once_when_all_ranks_are_present() -> None:
    """The coordinator waits neither for the inventory nor for a pod beyond the requested ones."""
    desk = Desk(replicas=2)
    assert desk.say(register(A)) == []
    assert kinds(desk.say(register(B))) == ["Prepare", "Prepare"]


def test_after_training_the_coordinator_waits_for_all_ranks_that_may_be_alive() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1, 2, trained=True)
    kept = Kept(GenerationId(1, "b", 1), 2, "d", 0, False)
    for who in (A, B):
        desk.agent(who)
        assert desk.say(register(who, checkpoint=kept)) == []
    assert desk.state.due_ns == desk.state.roster.rank(A).ready_ns + SETTLE_MS * MS


def test_a_silent_rank_is_detected_in_time_beside_a_dead_one() -> None:
    desk, _ = running()
    desk.post(coord.FromAgent(m.RankDead(A, -9, "killed", True)))
    heard_ns = desk.state.roster.rank(B).heard_ns
    assert desk.state.wake_ns == heard_ns + FREEZE_MS * MS
    for _ in range(3):
        desk.post(coord.FromAgent(m.PodBeat(B.slot, 0)), FREEZE_MS // 5)
    desk.now = heard_ns + FREEZE_MS * MS
    assert kinds(desk.post(coord.Tick(), 0)) == ["KillRank"]


def test_before_the_first_generation_a_leaving_rank_with_state_is_kept() -> None:
    """A rank with weights may be the only one that has them (R16)."""
    desk = Desk(replicas=2)
    assert kinds(desk.say(register(B, leaving=True))) == ["Dismiss"]
    assert "Dismiss" not in kinds(desk.say(register(A, GEN_1, leaving=True)))
    desk, _ = running()
    assert kinds(desk.say(register(C, GEN_1, leaving=True))) == ["Dismiss"]


def test_a_rank_whose_pod_is_gone_is_reported_with_exit_code_0() -> None:
    desk, _ = running()
    desk.post(coord.FromAgent(m.RankGone(B)))
    inventory = m.Inventory(2, ((0, 0),))
    desk.coordinator.handle(desk.now, coord.SetInventory(inventory))
    died = [e for e in desk.coordinator.state.effects if isinstance(e, coord.Happened)]
    assert [(e.message, e.facts) for e in died if e.reason == "RankDied"] == [
        (f"rank {B}: its pod is gone (inventory 2)", {"exit_code": "0"})
    ]
