"""The 24 ways in which the first protocol failed, each as a scenario that ends well now.

One test compares each trace with the golden text. Another runs the same scenario without the one
decision that repairs it, and expects a broken invariant. If the structure rules a violation out and
no decision can be switched off, the structure is tested (V22, V23).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import pytest
from paceline.core import coordinator as coord
from paceline.core.coordinator import changing, forming
from paceline.core.messages import Commit, Endpoints, Prepare, Prepared, Release
from paceline.core.protocol import trigger
from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.log import Log
from paceline.core.protocol.pending import Pending
from paceline.core.protocol.records import DataPlan, Gen
from paceline.core.protocol.rows import members_of
from paceline.core.rank import events as ev
from paceline.core.rank import machine, membership, rounds
from paceline.core.rank.machine import Rank
from paceline.core.rank.state import RankState
from paceline_api.ids import GenerationId
from paceline_api.rounds import RoundSettings

from testing.makers import GEN_1, member
from tests.core.scenario import FOLDER, Scenario, all_scenarios

SCENARIOS = {s.name.split("_")[0]: s for s in all_scenarios()}
Patch = Callable[[pytest.MonkeyPatch], None]


def by_name(scenario: Scenario) -> str:
    return scenario.name


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=by_name)
def test_a_scenario_matches_its_golden_trace(scenario: Scenario) -> None:
    trace = scenario.run()
    if os.environ.get("PACELINE_GOLDEN") == "write":
        path = FOLDER / f"{scenario.name}.txt"
        path.write_text(scenario.head + "---\n" + "\n".join(trace) + "\n")
    else:
        assert trace == scenario.trace, "PACELINE_GOLDEN=write writes the traces anew"


# ---- rules switched off --------------------------------------------------------------------------


def off(where: object, name: str, instead: Any) -> Patch:
    return lambda patch: patch.setattr(where, name, instead)


def both(*patches: Patch) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        for one in patches:
            one(patch)

    return apply


anybody_may_commit = both(
    off(forming, "may_commit", lambda *_: ""),
    off(forming, "may_begin", lambda *_, **__: ""),
)


def one_name_for_all(patch: pytest.MonkeyPatch) -> None:
    real = coord.Coordinator

    def nameless(config: Any, *, uid: str, now_ns: int) -> Any:
        return real(config, uid="same", now_ns=now_ns)

    patch.setattr(coord, "Coordinator", nameless)


def leave_at_once(rank: RankState) -> None:
    """Exit with the stop round instead of reporting it."""
    if rank.log.stopped and rank.has_state and not rank.passive and not rank.ended:
        rank.ended = True
        rank.emit(ev.Exit(True, "all data applied"))


def release_whoever_hears_it(rank: RankState, release: Release) -> None:
    rank.ended = True
    rank.emit(ev.Exit(rank.log.stopped, f"released by {release.generation}"))


def newest_version(candidates: Collection[Any]) -> Any:
    full = [r for r in candidates if r.has_state]
    return max(full, key=lambda r: (r.version, r.last), default=None)


def whoever_is_listed(report: Prepared, best: Prepared, _: object) -> bool:
    listed = members_of(best.members)
    return report.has_state and (report.last == best.last or report.member in listed)


def counter_first(patch: pytest.MonkeyPatch) -> None:
    def key(g: GenerationId) -> tuple[int, int, str]:
        return g.counter, g.incarnation, g.coordinator

    patch.setattr(GenerationId, "__lt__", lambda a, b: key(a) < key(b))
    patch.setattr(GenerationId, "__le__", lambda a, b: key(a) <= key(b))
    patch.setattr(GenerationId, "__gt__", lambda a, b: key(a) > key(b))
    patch.setattr(GenerationId, "__ge__", lambda a, b: key(a) >= key(b))


def only_rounds_are_passed_on(patch: pytest.MonkeyPatch) -> None:
    real = Log.missing_after

    def without_generations(log: Log, index: int, digest: str) -> tuple[Any, ...]:
        return tuple(r for r in real(log, index, digest) if not isinstance(r, Gen))

    patch.setattr(Log, "missing_after", without_generations)


def discard_at_once(patch: pytest.MonkeyPatch) -> None:
    real = membership._join_without_state

    def discard(rank: RankState, commit: Commit) -> None:
        real(rank, commit)
        rank.has_state = False

    patch.setattr(membership, "_join_without_state", discard)


def pending_again_and_again(patch: pytest.MonkeyPatch) -> None:
    real = rounds.announce

    def forgetful(rank: RankState) -> None:
        for _ in range(0 if rank.announced_pending else 3):
            rank.announced_pending = False
            real(rank)

    patch.setattr(rounds, "announce", forgetful)


def k_of_the_generation(log: Log) -> int:
    assert log.gen is not None
    return len(log.gen.active)


def never_bench(_arrivals: Arrivals, _now_ns: int, why: str) -> trigger.Decision:
    return trigger.Decision(None, why)


def leavers_count(last_active: Any, promised: Any, _leaving: Any, unaccounted: str) -> str:
    return REAL_MAY_COMMIT(last_active, promised, (), unaccounted)


REAL_MAY_COMMIT = forming.may_commit


RULES: dict[str, tuple[Patch, str]] = {
    "V01": (anybody_may_commit, "rounds of .* are lost"),
    "V02": (both(anybody_may_commit, one_name_for_all), "two generations are called"),
    "V03": (off(rounds, "report_stop", leave_at_once), "I14: two ends"),
    "V04": (off(membership, "_release", release_whoever_hears_it), "I14: two ends"),
    "V05": (off(forming, "winner", newest_version), "LogsDiverge"),
    "V06": (off(Arrivals, "something", property(lambda _: False)), "I8: not over"),
    "V07": (
        both(
            off(Pending, "lose_all", lambda *_, **__: []),
            off(Pending, "drop_revoked", lambda *_, **__: []),
        ),
        "DealError|I1",
    ),
    "V08": (off(forming, "counts_as_state", whoever_is_listed), "LogsDiverge"),
    "V09": (off(membership, "forget_queue", lambda *_: None), "LogError|I5"),
    "V10": (counter_first, "have finished"),
    "V11": (off(trigger, "_or_bench", never_bench), "I8: not over"),
    "V12": (off(forming, "has_all", lambda *_: True), "StateLost"),
    "V13": (off(machine, "EARLY_MAX", 0), "I8: not over"),
    "V14": (
        off(forming, "may_join", lambda r, best: r.ready and not best.stopped),
        "records without a round|I8: not over",
    ),
    "V15": (only_rounds_are_passed_on, "LogError|I5|I14"),
    "V16": (off(rounds, "unwritten", lambda rank: rank.request), "written after"),
    "V17": (off(forming, "counts_as_state", lambda r, *_: r.has_state), "LogsDiverge"),
    "V18": (off(changing, "find_reason", lambda _: None), "I8: not over"),
    "V19": (discard_at_once, "StateLost"),
    "V20": (pending_again_and_again, "R11"),
    "V21": (off(Log, "quorum", property(k_of_the_generation)), "I6"),
    "V24": (off(forming, "may_commit", leavers_count), "are lost|Interrupted"),
}


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=by_name)
def test_a_scenario_breaks_an_invariant_without_its_rule(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off, symptom = RULES[scenario.name.split("_")[0]]
    switch_off(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        scenario.run()


def test_every_violation_has_a_scenario_or_a_structural_test() -> None:
    assert SCENARIOS.keys() == RULES.keys()
    assert SCENARIOS.keys() | {"V22", "V23"} == {f"V{n:02}" for n in range(1, 25)}


# ---- ruled out by structure ----------------------------------------------------------------------


def lone_rank() -> Rank:
    """Build a rank in round 0 with its reduction in flight."""
    me, ends = member(0), Endpoints("t", "d")
    rank = Rank(me, pid=1, host="h", endpoints=ends)
    plan = DataPlan(samples=40, batch=4, epochs=1, seed=1)
    gen = Gen(
        GEN_1, (me,), (me,), (me,), 0, lookahead=((me, 2),), plan=plan, settings=RoundSettings()
    )
    commit = Commit(gen, me, (), me, (), ((me, ends),))
    start: list[ev.Event] = [ev.Begin("same", plan, 2), Prepare(GEN_1), commit, ev.ChannelOpened()]
    effects = [e for event in [*start, ev.Step((0,), 4, 4)] for e in rank.handle(0, event)]
    assert isinstance(effects[-1], ev.Reduce)
    return rank


def test_v22_a_rank_finishes_only_on_a_release_of_its_record_and_version() -> None:
    """`test_saving` covers what `Publish` makes visible before the release (R19)."""
    rank = lone_rank()
    rank.handle(0, ev.Reduced())
    for release in (Release(GEN_1, 1), Release(replace_counter(2), 1)):
        assert not _finishes(lone_rank(), release)
    assert not _finishes(rank, Release(GEN_1, 1)), "the stop round is not committed"


def replace_counter(counter: int) -> GenerationId:
    return GEN_1._replace(counter=counter)


def _finishes(rank: Rank, release: Release) -> bool:
    return any(isinstance(e, ev.Exit) and e.finished for e in rank.handle(0, release))


def test_v23_a_promise_is_made_between_two_updates() -> None:
    """One machine answers PREPARE and commits rounds, one event after the other (R3)."""
    rank = lone_rank()
    newer = replace_counter(2)
    answers = rank.handle(0, Prepare(newer))
    [report] = [e.message for e in answers if isinstance(e, ev.ToCoordinator)]
    assert isinstance(report, Prepared)
    assert (report.id, report.version) == (newer, 0)
    assert not [e for e in rank.handle(0, ev.Reduced()) if isinstance(e, ev.Apply)]
    assert rank.state.log.version == 0
