"""Joining ranks are admitted together within stabilizationSeconds, up to an allowed size."""

from __future__ import annotations

import pytest
from msgspec import Struct
from msgspec.structs import replace
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.coordinator.forming import EvidenceWait, beginners
from paceline.core.coordinator.sizes import Sizes, pods_to_drain
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.snapshot import Kept
from paceline_api.ids import NO_GENERATION, MemberId
from paceline_api.status import RankPhase

from testing.makers import GEN_1, members
from tests.core.coordinator.test_coordinator import SETTLE_MS, A, B, C, Desk, kinds, prepared
from tests.core.coordinator.test_coordinator import register as ready
from tests.core.coordinator.test_forming import decide, formed, joiner, report

D = MemberId(3, 0, 0)
STABLE_MS = 100
"""The stabilization time that `Desk` uses."""


def wanting(replicas: int, *who: MemberId) -> Desk:
    """Build a running job of these ranks that was scaled up."""
    desk = Desk(replicas=len(who))
    desk.pods(*(x.slot for x in who))
    desk.form(*who)
    desk.pods(0, 1, 2)
    desk.post(coord.SetTargets(m.Targets(replicas=replicas)))
    return desk


def comes(desk: Desk, who: MemberId, ms: int = 1) -> list[Struct]:
    desk.agent(who)
    return desk.say(ready(who), ms)


def tick(desk: Desk, ms: int) -> bool:
    """Let time pass and return True if a membership change begins."""
    return "Prepare" in kinds(desk.post(coord.Tick(), ms))


def dies(desk: Desk, who: MemberId) -> list[Struct]:
    return desk.post(coord.FromAgent(m.RankDead(who, -9, "killed", True)))


# ---- stabilizationSeconds ------------------------------------------------------------------------


def test_joiners_that_arrive_together_join_in_one_change() -> None:
    desk = wanting(4, A)
    assert "Prepare" not in kinds(comes(desk, B))
    assert "Prepare" not in kinds(comes(desk, C, STABLE_MS // 2))
    assert desk.state.due_ns is None
    assert desk.state.wake_ns is not None
    assert not tick(desk, STABLE_MS // 2 - 5)
    assert desk.coordinator.status(desk.now).conditions, "the group is whole while they wait"
    sent = desk.post(coord.Tick(), 10)
    assert kinds(sent) == ["Prepare"] * 3


def test_a_change_starts_at_once_when_all_requested_ranks_are_ready() -> None:
    desk = wanting(2, A)
    assert kinds(comes(desk, B)).count("Prepare") == 2


def test_a_death_starts_a_change_at_once_and_admits_ready_joiners() -> None:
    desk = wanting(4, A, B)
    comes(desk, C)
    prepares = [e for e in dies(desk, B) if isinstance(e, m.Prepare)]
    assert len(prepares) == 2
    assert desk.state.asked == {A, C}
    at = desk.state.commit.gen.id if desk.state.commit else NO_GENERATION
    old = {"last": at, "members": (A, B), "with_state": (A, B), "active": (A, B)}
    desk.say(prepared(A, desk.state.proposal, gen_active=(A, B), has_state=True, **old))
    desk.say(prepared(C, desk.state.proposal))
    why = desk.coordinator.status(desk.now).changes[-1].why
    assert why == f"rank {B}: killed; rank {C} joins"


def test_a_drain_does_not_wait_for_others() -> None:
    desk = wanting(4, A, B)
    at = desk.state.proposal
    comes(desk, C)
    assert "Prepare" in kinds(desk.say(m.Leaving(at, B, False)))


def test_a_joiner_that_dies_before_joining_causes_no_change() -> None:
    desk = wanting(4, A, B)
    comes(desk, C)
    dies(desk, C)
    assert not tick(desk, STABLE_MS + 1)


# ---- allowedSizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("there", "train"), [(1, 0), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_the_largest_allowed_size_that_is_reached_trains(there: int, train: int) -> None:
    ranks = members(*range(there))
    assert len(Sizes((2, 4)).begin(ranks)) == train


@pytest.mark.parametrize(
    ("inside", "outside", "join"),
    [
        (2, 1, 0),
        (2, 2, 2),
        (2, 3, 2),
        (1, 1, 1),
        (3, 1, 1),
        (3, 5, 1),
        (5, 3, 0),
        (0, 3, 2),
        (0, 1, 1),
    ],
)
def test_ranks_join_up_to_the_next_allowed_size(inside: int, outside: int, join: int) -> None:
    """No member is dismissed if more than an allowed size train.

    If no rank is inside, ranks outside take over.
    """
    ranks = members(*range(inside + outside))
    assert Sizes((2, 4)).join(ranks[:inside], ranks[inside:]) == set(ranks[inside:][:join])


def test_a_replica_counts_only_with_all_of_its_ranks() -> None:
    ranks = [MemberId(slot, local, 0) for slot in range(3) for local in range(2)]
    sizes = Sizes((1, 3), procs=2)
    assert sizes.begin(ranks) == set(ranks)
    ranks.remove(MemberId(0, 1, 0))
    assert sizes.begin(ranks) == {MemberId(1, 0, 0), MemberId(1, 1, 0)}
    assert sizes.begin(ranks, first=[(2, 0)]) == {MemberId(2, 0, 0), MemberId(2, 1, 0)}
    assert sizes.join(ranks[1:3], [ranks[0], *ranks[3:]]) == set(), "slot 0 is not whole"


def test_a_process_of_a_training_replica_rejoins_at_any_size() -> None:
    inside = [MemberId(0, 0, 0), MemberId(1, 0, 0), MemberId(1, 1, 0)]
    back = MemberId(0, 1, 0)
    assert Sizes((4,), procs=2).join(inside, [back]) == {back}


def states(desk: Desk) -> dict[MemberId, RankPhase]:
    return {r.member: r.state for r in desk.coordinator.status(desk.now).ranks}


def test_surplus_ranks_stand_by_until_the_next_size_is_reached() -> None:
    desk = Desk(replicas=4, allowed=(2, 4))
    desk.pods(0, 1, 2, 3)
    for who in (A, B, C):
        comes(desk, who)
    assert tick(desk, SETTLE_MS), "the start goes on with those who are there"
    for who in (A, B, C):
        desk.say(prepared(who, desk.state.proposal))
    assert desk.state.gen is not None
    assert desk.state.gen.members == (A, B)
    for who in (A, B):
        desk.say(m.Started(desk.state.proposal, who, True))
    assert states(desk)[C] is RankPhase.STANDBY
    assert not tick(desk, STABLE_MS + 1)
    assert kinds(comes(desk, D)).count("Prepare") == 4


def test_a_standby_replica_replaces_a_dead_member() -> None:
    commit = formed(
        report(A), report(B), joiner(D), unaccounted="", sizes=Sizes((3, 5)), possible_ranks=4
    )
    assert commit.gen.members == (A, B, D)
    assert [(x.member, x.why) for x in commit.gen.left_out] == [(C, "silent")]


def test_members_without_state_are_not_dismissed() -> None:
    """The state of these members is on its way when the last of four dies."""
    four = (A, B, C, D)
    facts = {"members": four, "gen_active": (A,), "active": (A,)}
    best = report(A, **facts)
    commit = formed(best, joiner(B), joiner(C), unaccounted="", sizes=Sizes((4,)), possible_ranks=4)
    assert commit.gen.members == (A, B, C)


def test_a_standby_pod_is_drained_before_training_pods() -> None:
    """The rule also holds for a new coordinator that has formed no generation."""
    desk = Desk(replicas=2, allowed=(1, 2))
    desk.pods(0, 1)
    for who in (A, B):
        comes(desk, who)
    roster = desk.state.roster
    roster.ranks[B].has_state = True
    roster.ranks[B].beat = replace(roster.ranks[B].beat, step_s=0.2)
    assert [pod.slot for pod in pods_to_drain(roster, 1, None)] == [0]
    assert [pod.slot for pod in pods_to_drain(roster, 1, (A,))] == [1]


def test_a_pod_whose_loop_has_ended_is_drained_before_training_pods() -> None:
    """The loop of a self-fed script may end early on a fast rank while others still train."""
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    for who, done, step_s in ((A, 1.0, 0.1), (B, 0.0, 0.2)):
        desk.say(m.Heartbeat(who, at, at, 3, done=bool(done), step_s=step_s))
    assert [pod.slot for pod in pods_to_drain(desk.state.roster, 1, (A, B))] == [0]


def test_the_slowest_replica_is_drained_first_and_draining_pods_count() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    at = desk.form(A, B)
    for who, step_s in ((A, 0.3), (B, 0.2)):
        desk.say(m.Heartbeat(who, at, at, 3, step_s=step_s))
    assert [pod.slot for pod in pods_to_drain(desk.state.roster, 1, (A, B))] == [0]
    desk.state.roster.pods[1, 0].draining = True
    assert pods_to_drain(desk.state.roster, 1, (A, B)) == []


def test_a_checkpoint_found_by_only_part_of_a_replica_starts_no_generation() -> None:
    """The coordinator must not ask all ranks again at each heartbeat."""
    kept = Kept(GEN_1, 5, "digest")
    able = {MemberId(slot, local, 0): None for slot in range(2) for local in range(2)}
    half = {**able, MemberId(2, 0, 0): kept}
    sizes = Sizes((2, 3), procs=2)
    assert beginners(half, kept, sizes) == ()
    whole = {**half, MemberId(2, 1, 0): kept}
    assert {m.slot for m in beginners(whole, kept, sizes)} == {0, 1, 2}


def test_training_ranks_are_not_dismissed_to_reach_an_allowed_size() -> None:
    commit = formed(report(A), report(B), report(C), unaccounted="", sizes=Sizes((2, 4)))
    assert commit.gen.members == (A, B, C)


def test_below_the_smallest_size_a_job_continues_and_no_rank_joins() -> None:
    commit = formed(report(A), report(B), joiner(D), unaccounted="", sizes=Sizes((4, 8)))
    assert commit.gen.members == (A, B)


def test_below_the_smallest_size_a_joiner_replaces_a_leaving_rank() -> None:
    commit = formed(report(A, leaving=True), joiner(D), unaccounted="", sizes=Sizes((4, 8)))
    assert commit.gen.members == (A, D)


def test_a_draining_member_is_not_counted_but_stays_a_member() -> None:
    everybody = [report(x) for x in (A, B, C)]
    commit = formed(*everybody, sizes=Sizes((2, 4)), draining={A})
    assert commit.gen.members == (A, B, C)


def test_no_job_begins_below_the_smallest_size() -> None:
    desk = Desk(replicas=4, min_replicas=1, allowed=(2, 4))
    desk.pods(0)
    comes(desk, A)
    assert not tick(desk, SETTLE_MS)
    assert "allowedSizes" in desk.state.waits
    assert isinstance(
        decide(joiner(A), unaccounted="", had_state=False, sizes=Sizes((2, 4))), EvidenceWait
    )


def test_a_job_does_not_begin_at_an_allowed_size_below_min_replicas() -> None:
    desk = Desk(replicas=4, min_replicas=3, allowed=(2, 4))
    desk.pods(0, 1, 2)
    for who in (A, B, C):
        comes(desk, who)
    assert not tick(desk, SETTLE_MS)
    assert desk.state.waits.startswith("3 of the 4 ranks")


def test_the_pod_of_rank_0_of_a_script_is_drained_last() -> None:
    """It writes what the job saves; in other jobs the slowest pod goes first (S14)."""
    desk = Desk()
    desk.pods(0, 1)
    desk.form(A, B, plan=DataPlan(slots=2))
    roster, slow = desk.state.roster, {"step_s": 5.0}
    roster.rank(A).beat = replace(roster.rank(A).beat, **slow)
    assert [pod.slot for pod in pods_to_drain(roster, 1, (A, B))] == [0]
    assert [pod.slot for pod in pods_to_drain(roster, 1, (A, B), last=0)] == [1]
    desk.post(coord.SetTargets(m.Targets(replicas=1)))
    assert [x.slot for x in roster.pods.values() if x.draining] == [1]
