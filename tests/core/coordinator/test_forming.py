"""Forming a generation: which ranks win or are left out, against slow oracles (R5, R6, R16)."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.coordinator.forming import (
    Broken,
    EvidenceWait,
    form,
    may_begin,
    may_commit,
    winner,
)
from paceline.core.coordinator.sizes import Sizes
from paceline.core.messages import Commit, Endpoints, Prepared, Register
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.rows import rows_of
from paceline_api.ids import NO_GENERATION, GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Pacing

from testing.examples import examples
from testing.makers import GEN_1, PLAN, members
from tests.core.coordinator.test_coordinator import SETS

NEW = GenerationId(2, "b", 1)
CI = settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
A, B, C, D = members(0, 1, 2, 3)


def subsets(of: tuple[MemberId, ...]) -> list[tuple[MemberId, ...]]:
    return list(chain.from_iterable(combinations(of, n) for n in range(len(of) + 1)))


def report(who: MemberId, **facts: Any) -> Prepared:
    """Build the report of a member of GEN_1 at version 5, in step with the others."""
    version = facts.get("version", 5)
    everybody = members(0, 1, 2)
    given_facts = {
        "last": GEN_1,
        "version": version,
        "index": version,
        "digest": f"log-{version}",
        "tail": tuple((v, f"log-{v}") for v in (version - 1, version)),
        "members": everybody,
        "with_state": everybody,
        "active": everybody,
        "gen_active": everybody,
        "benched": (),
        "accepted": GEN_1,
        "started": 0,
        "has_state": True,
        "ready": True,
        "leaving": False,
        "stopped": False,
        "request": 0,
        **facts,
    }
    given_facts |= {name: rows_of(given_facts[name]) for name in SETS}
    return Prepared(id=NEW, member=who, **given_facts)


def joiner(who: MemberId, **facts: Any) -> Prepared:
    nothing = {"last": NO_GENERATION, "version": 0, "index": 0, "digest": "", "tail": ((0, ""),)}
    return report(
        who,
        **{**nothing, "members": (), "with_state": (), "active": (), "gen_active": ()},
        **{"has_state": False, **facts},
    )


def register(report: Prepared, **facts: Any) -> Register:
    given_facts = {"fingerprint": "same", "plan": PLAN, "pacing": Pacing.SAMPLES, **facts}
    return Register(
        member=report.member,
        pid=1,
        host="h",
        endpoints=Endpoints("t", "d"),
        promise=NEW,
        last=report.last,
        version=report.version,
        has_state=report.has_state,
        ready=report.ready,
        **given_facts,
    )


def decide(*reports: Prepared, unaccounted: str = "somebody is silent", **facts: Any) -> Any:
    given_facts = {
        "registers": {r.member: register(r) for r in reports},
        "possible_ranks": 3,
        "wanted_ranks": 3,
        "had_state": True,
        "state_lost": "",
        "settings": RoundSettings(pacing=Pacing.AUTO),
        "sizes": Sizes(),
        "draining": (),
        **facts,
    }
    by_member = {r.member: r for r in reports}
    return form(NEW, by_member, dead={}, unaccounted=unaccounted, **given_facts)


def formed(*reports: Prepared, **facts: Any) -> Commit:
    answer = decide(*reports, **facts)
    assert isinstance(answer, Commit), answer
    return answer


# ---- R6 ------------------------------------------------------------------------------------------


def slow_may_commit(
    active: tuple[MemberId, ...],
    promised: tuple[MemberId, ...],
    leaving: tuple[MemberId, ...],
    everybody_known: bool,
) -> bool:
    """Apply the majority rule exactly as it is written, without arithmetic."""
    staying = [m for m in active if m in promised and m not in leaving]
    missing = [m for m in active if m not in staying]
    more_than_half = len(staying) > len(missing)
    half_with_lowest = len(staying) == len(missing) and sorted(active)[:1] == sorted(staying)[:1]
    return more_than_half or (half_with_lowest and bool(active)) or everybody_known


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_may_commit_agrees_with_a_plain_majority_rule(count: int) -> None:
    active = members(*range(count))
    outsider = members(9)
    for promised in subsets(active + outsider):
        for leaving in subsets(promised):
            for unaccounted in ("", "rank 3 is silent"):
                fast = not may_commit(active, promised, leaving, unaccounted)
                assert fast == slow_may_commit(active, promised, leaving, not unaccounted)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_two_disjoint_halves_cannot_both_commit_without_evidence(count: int) -> None:
    active = members(*range(count))
    for one in subsets(active):
        other = tuple(m for m in active if m not in one)
        assert may_commit(active, one, (), "x") or may_commit(active, other, (), "x")


@pytest.mark.parametrize("possible", range(1, 7))
@pytest.mark.parametrize("here", range(1, 7))
def test_two_first_generations_cannot_begin_at_the_same_time(here: int, possible: int) -> None:
    one = not may_begin(here, possible, "x", had_state=False)
    other = not may_begin(possible - here, possible, "x", had_state=False)
    assert not (one and other)
    assert may_begin(here, possible, "x", had_state=True), "weights may live where nobody looks"
    assert not may_begin(here, possible, "", had_state=True)


# ---- R5 ------------------------------------------------------------------------------------------

generations = st.builds(GenerationId, st.integers(1, 3), st.sampled_from("ab"), st.integers(1, 3))


@CI
@given(st.lists(st.tuples(generations, st.integers(0, 9), st.booleans()), max_size=5))
def test_the_winner_has_the_latest_generation_then_the_highest_version(
    facts: list[tuple[GenerationId, int, bool]],
) -> None:
    reports = {
        who: report(who, last=last, version=version, has_state=state)
        for who, (last, version, state) in zip(members(*range(5)), facts, strict=False)
    }
    best = winner(reports.values())
    candidates = [r for r in reports.values() if r.has_state]
    if best is None:
        assert not candidates
        return
    for r in candidates:
        assert r.last <= best.last
        assert r.last != best.last or r.version <= best.version


def test_a_newer_generation_beats_a_higher_version() -> None:
    """The update of a rank that was left out is not forced on the others (V5)."""
    old = report(B, last=GEN_1, version=9)
    newer = GenerationId(1, "a", 2)
    ours = report(A, last=newer, members=(A,), with_state=(A,), active=(A,), gen_active=(A,))
    commit = formed(ours, old)
    assert (commit.holder, commit.gen.version) == (A, 5)
    assert commit.joiners == (B,)


def test_a_member_without_recorded_state_counts_as_a_joiner() -> None:
    """The rank was a member of the group but never received the group's state (V8)."""
    newer = GenerationId(1, "a", 2)
    ours = report(A, last=newer, members=(A, B), with_state=(A,), active=(A,), gen_active=(A,))
    commit = formed(ours, report(B, version=4))
    assert commit.joiners == (B,)
    assert commit.gen.with_state == (A,)


def test_ranks_one_round_behind_are_repaired_by_the_holder() -> None:
    commit = formed(report(A, version=4), report(B), report(C, version=4))
    assert commit.holder == commit.donor == B
    assert [x for x, *_ in commit.behind] == [A, C]
    assert commit.gen.version == 5


def test_a_rank_with_a_short_log_is_not_chosen_to_repair_others() -> None:
    """A rank that has just received its state lacks the earlier records.

    Another rank with the same log has them.
    """
    short = report(A, tail=((5, "log-5"),))
    commit = formed(short, report(B), report(C, version=4))
    assert commit.holder == B
    assert [x for x, *_ in commit.behind] == [C]
    assert formed(short, report(B)).holder == A, "where nobody lacks anything"


def test_diverging_logs_fail_the_job_and_name_the_rank() -> None:
    answer = decide(report(A), report(B, version=4, digest="other"), report(C))
    assert isinstance(answer, Broken)
    assert answer.reason == "LogsDiverge"
    assert "rank 1.0#0" in answer.message


# ---- leaving (R16) -------------------------------------------------------------------------------


def test_a_leaving_rank_is_dismissed_and_the_others_stay() -> None:
    commit = formed(report(A, leaving=True), report(B), report(C))
    assert commit.gen.members == (B, C)
    assert [(x.member, x.why) for x in commit.gen.left_out] == [(A, "leave")]


def test_a_leaving_rank_does_not_count_toward_the_majority() -> None:
    """The case is that of scenario V24."""
    pair = {"members": (A, B), "active": (A, B), "gen_active": (A, B), "with_state": (A, B)}
    assert isinstance(decide(report(A, leaving=True, **pair)), EvidenceWait)


def test_the_only_holder_of_a_round_stays_until_another_rank_has_it() -> None:
    """No rank waits for a segment that only a dismissed rank has (V12)."""
    commit = formed(report(A, leaving=True), report(B, version=4), report(C, version=4))
    assert A in commit.gen.members
    assert commit.holder == A


def test_other_ranks_become_active_before_the_last_active_rank_leaves() -> None:
    lone = {"gen_active": (A,), "active": (A,), "with_state": (A, B), "members": (A, B)}
    first = formed(report(A, leaving=True, **lone), report(B, **lone), unaccounted="")
    assert first.gen.members == (A, B)
    assert first.gen.active == (A, B)
    after = {"gen_active": (A, B), "active": (A, B), "with_state": (A, B), "members": (A, B)}
    second = formed(report(A, leaving=True, **after), report(B, **after), unaccounted="")
    assert second.gen.members == (B,)


def test_a_draining_joiner_is_never_admitted() -> None:
    assert D not in formed(report(A), report(B), joiner(D, leaving=True)).gen.members


def test_no_rank_joins_a_stopped_job() -> None:
    commit = formed(report(A, stopped=True), report(B, stopped=True), joiner(D))
    assert commit.gen.members == (A, B)


# ---- joining and benched ranks (A6, R26) ---------------------------------------------------------


def test_a_joiner_is_active_only_if_no_rounds_have_run() -> None:
    later = formed(report(A), report(B), joiner(D))
    assert (later.gen.active, later.joiners) == ((A, B), (D,))
    first = formed(report(A, version=1, started=1), report(B, version=1, started=1), joiner(D))
    assert first.gen.active == (A, B, D)


def test_a_member_with_complete_state_becomes_active_but_a_benched_rank_does_not() -> None:
    facts = {"members": (A, B, C), "active": (A,), "gen_active": (A,), "benched": (B,)}
    commit = formed(report(A, **facts), report(B, **facts), report(C, **facts))
    assert commit.gen.active == (A, C)


def test_the_first_generation_takes_the_lowest_ranks_weights_and_pacing() -> None:
    commit = formed(joiner(B), joiner(A), joiner(C), had_state=False)
    assert commit.gen.with_state == (A,)
    assert commit.gen.active == (A, B, C)
    assert commit.gen.settings is not None
    assert commit.gen.settings.pacing is Pacing.SAMPLES
    assert commit.joiners == (B, C)


def test_a_script_begins_with_the_ranks_that_are_wanted_and_no_call_waits_for_others() -> None:
    """The job was scaled down to two replicas before the four had begun (S1, S3)."""
    reports = joiner(A), joiner(B)
    script = DataPlan(slots=4)
    facts: dict[str, Any] = {
        "registers": {r.member: register(r, plan=script) for r in reports},
        "had_state": False,
        "possible_ranks": 2,
        "unaccounted": "",
    }
    waits = decide(*reports, **facts, wanted_ranks=3)
    assert waits == EvidenceWait("2 of 3 ranks of the script have begun")
    first = formed(*reports, **facts, wanted_ranks=2).gen
    log = Log()
    log.append(first)
    assert (log.active, log.wanted_slots) == ((A, B), 2)
    assert log.plan.script == 4, "the script still has four slots"


def test_a_job_does_not_start_over_while_its_weights_may_exist() -> None:
    lost = "all ranks that had the weights of version 7 are lost"
    waits = decide(joiner(A), joiner(B), joiner(C), state_lost=lost)
    assert isinstance(waits, EvidenceWait)
    sure = decide(joiner(A), joiner(B), state_lost=lost, unaccounted="")
    assert isinstance(sure, Broken)
    assert (sure.reason, sure.message) == ("StateLost", lost)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"fingerprint": "other"}, "ParametersDiffer"),
        ({"plan": replace(PLAN, seed=2)}, "DataDiffers"),
    ],
)
def test_mismatched_ranks_are_rejected_before_the_first_reduction(
    facts: dict[str, object], reason: str
) -> None:
    reports = [joiner(A), joiner(B)]
    registers = {A: register(reports[0]), B: register(reports[1], **facts)}
    answer = decide(*reports, had_state=False, possible_ranks=2, registers=registers)
    assert isinstance(answer, Broken)
    assert answer.reason == reason
    assert "rank 1.0#0" in answer.message
    assert answer.hint
