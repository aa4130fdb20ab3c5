"""The life cycle of a rank process in its agent: transitions, backoff and verdicts."""

from __future__ import annotations

import itertools
from itertools import product
from signal import SIGABRT, SIGKILL, SIGSEGV, SIGTERM
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.agent.exits import (
    Death,
    EndKind,
    PlaceEnd,
    RankOutcome,
    how_it_ended,
    last_end,
    why_it_ended,
)
from paceline.core.agent.supervise import (
    BACKOFF_MAX_NS,
    BACKOFF_NS,
    DISMISSED_NS,
    HEALTHY_NS,
    NEXT,
    SHUTDOWN_NS,
    START_NS,
    Command,
    Cue,
    Effect,
    Event,
    Exited,
    JobClosing,
    JobShutdown,
    Kill,
    Launch,
    NeverStarted,
    Place,
    PlacePhase,
    ProcessDrain,
    RankLimits,
    Report,
    ReportedOutcome,
    SendKill,
    Tick,
    Up,
    backoff_ns,
    pod_end,
    reason_to_leave,
)
from paceline.core.messages import DealtBatch, RankDead, RankStarted, ScriptError
from paceline_api.ids import ATTEMPT_STRIDE, MemberId
from paceline_api.settings import FailureRuleSettings
from paceline_api.types.enums import FailureAction

from testing.makers import GEN_1

S = 1_000_000_000
LIMITS = RankLimits(restarts_max=3, drain_ns=30 * S)

REACH: dict[PlacePhase, list[Event]] = {
    PlacePhase.WAITING: [Tick(), Up(7), Exited(1, "")],
    PlacePhase.STARTING: [Tick()],
    PlacePhase.RUNNING: [Tick(), Up(7)],
    PlacePhase.DRAINING: [Tick(), Up(7), ProcessDrain("SIGTERM")],
    PlacePhase.KILLED: [Tick(), Up(7), Kill("silent")],
    PlacePhase.ENDED: [Tick(), Up(7), Exited(2, "")],
}
"""Events that bring a new place into a phase at time 0."""

CUE_EVENTS: dict[Cue, list[Event]] = {
    Cue.UP: [Up(8)],
    Cue.DEAD_AGAIN: [Exited(1, "")],
    Cue.DEAD_LAST: [ReportedOutcome(RankOutcome.FINISHED, ""), Exited(0, "")],
    Cue.DRAIN: [ProcessDrain("SIGTERM")],
    Cue.KILL: [Kill("silent")],
    Cue.TIME: [Tick()],
}


def make_place(phase: PlacePhase = PlacePhase.WAITING, limits: RankLimits = LIMITS) -> Place:
    place = Place(2, 0, 5, limits)
    for event in REACH[phase]:
        place.handle(0, event)
    assert place.phase is phase
    return place


def feed(place: Place, now_ns: int, *events: Event) -> list[Effect]:
    return [effect for event in events for effect in place.handle(now_ns, event)]


@pytest.mark.parametrize(("phase", "cue"), list(product(PlacePhase, Cue)), ids=str)
def test_each_phase_and_cue_follows_the_transition_table(phase: PlacePhase, cue: Cue) -> None:
    place = make_place(phase)
    events = CUE_EVENTS[cue]
    if (phase, cue) == (PlacePhase.RUNNING, Cue.TIME):  # Only a finished rank has a deadline.
        feed(place, 0, ReportedOutcome(RankOutcome.FINISHED, ""))
    now_ns = place.wake_at_ns if cue is Cue.TIME and place.wake_at_ns is not None else 0
    if (phase, cue) in NEXT:
        feed(place, now_ns, *events)
        assert place.phase is NEXT[phase, cue]
    elif cue is Cue.TIME:
        assert place.wake_at_ns is None, "no timer may be armed where none may fire"
        assert feed(place, 10**18, Tick()) == []
        assert place.phase is phase
    elif (phase, cue) == (PlacePhase.DRAINING, Cue.DEAD_AGAIN):
        feed(place, now_ns, *events)  # No process is started in a pod that drains.
        assert place.phase is PlacePhase.ENDED
    else:
        with pytest.raises(AssertionError):
            feed(place, now_ns, *events)


def test_the_transition_table_reaches_every_phase_and_never_leaves_ended() -> None:
    assert set(NEXT.values()) == set(PlacePhase)
    assert {after for (before, _), after in NEXT.items() if before is PlacePhase.ENDED} == {
        PlacePhase.ENDED
    }


def test_a_crashed_rank_is_restarted_after_the_backoff() -> None:
    place = Place(2, 1, 5, LIMITS)
    first, second = MemberId(2, 1, 5 * ATTEMPT_STRIDE), MemberId(2, 1, 5 * ATTEMPT_STRIDE + 1)
    assert feed(place, 0, Tick()) == [Launch(first)]
    assert feed(place, 1 * S, Up(41)) == [Report(RankStarted(first, 41))]
    [report] = feed(place, 9 * S, Exited(-SIGSEGV, "in conv2d"))
    assert report == Report(
        RankDead(first, -11, "signal 11 (SIGSEGV); last lines:\nin conv2d", restarts=True)
    )
    assert place.wake_at_ns == 10 * S
    assert feed(place, 10 * S - 1, Tick()) == []
    assert feed(place, 10 * S, Tick()) == [Launch(second)]
    feed(place, 11 * S, Up(42), ReportedOutcome(RankOutcome.FINISHED, ""))
    assert feed(place, 20 * S, Exited(0, "")) == [Report(RankDead(second, 0, "", restarts=False))]
    assert place.ended == PlaceEnd(EndKind.FINISHED, "", 0)
    assert place.dead == [first, second]


def test_a_death_reports_the_exception_and_the_batch() -> None:
    place = Place(0, 0, 0, LIMITS)
    raised = ScriptError("OSError", "bad sector", "train.py", 7)
    feed(place, 0, Tick(), Up(1), ReportedOutcome(RankOutcome.FAILED, "OSError", error=raised))
    [report] = feed(place, 1 * S, Exited(1, "", DealtBatch(5, 1), 12))
    assert isinstance(report, Report)
    dead = report.message
    assert isinstance(dead, RankDead)
    assert (dead.error, dead.batch, dead.version) == (raised, DealtBatch(5, 1), 12)
    assert list(place.failures) == [dead], "a new coordinator has to hear of it"


def test_an_exception_before_init_is_parsed_from_the_traceback() -> None:
    place = Place(0, 0, 0, LIMITS)
    text = 'Traceback ...\n  File "train.py", line 4, in <module>\nImportError: no such lib'
    [report] = feed(place, 1 * S, Tick(), Up(1), Exited(1, text))[-1:]
    assert isinstance(report, Report)
    assert isinstance(report.message, RankDead)
    assert report.message.error == ScriptError("ImportError", "no such lib", "train.py", 4)
    assert report.message.why.startswith("ImportError: no such lib (train.py, line 4)")


@pytest.mark.parametrize("code", [-SIGKILL, -15])
def test_an_external_signal_does_not_count_as_a_script_failure(code: int) -> None:
    place = Place(0, 0, 0, LIMITS)
    feed(place, 0, Tick(), Up(1), Exited(code, "", DealtBatch(5, 1)))
    assert not place.failures


def test_a_rank_killed_by_its_agent_does_not_count_as_a_script_failure() -> None:
    place = Place(0, 0, 0, LIMITS)
    feed(place, 0, Tick(), Up(1), Kill("silent"), Exited(-SIGABRT, ""))
    assert not place.failures


def test_a_rank_that_failed_before_a_kill_keeps_its_own_reason() -> None:
    """The end of its launcher may be observed before the rank's own."""
    place = Place(0, 0, 0, LIMITS)
    outcome = ReportedOutcome(RankOutcome.FAILED, "KeyError: 1", error=ScriptError("KeyError", "1"))
    effects = feed(place, 0, Tick(), Up(1), outcome, Kill("its launcher ended"), Exited(1, ""))
    reports = [effect.message for effect in effects if isinstance(effect, Report)]
    [report] = [message for message in reports if isinstance(message, RankDead)]
    assert report.why == "KeyError: 1"
    assert report.error == outcome.error
    assert [dead.why for dead in place.failures] == ["KeyError: 1"]


@given(st.integers(1, 10_000))
def test_the_backoff_doubles_up_to_its_maximum(failures: int) -> None:
    pause, longer = backoff_ns(failures), backoff_ns(failures + 1)
    assert BACKOFF_NS <= pause <= longer <= BACKOFF_MAX_NS
    assert longer == min(2 * pause, BACKOFF_MAX_NS)


def failing(code: int, *rules: FailureRuleSettings, times: int = 4) -> Place:
    """Build a place with backoffLimit 1 whose processes end with this code."""
    place = Place(0, 0, 0, RankLimits(1, 0, rules))
    for _ in range(times):
        if place.ended is None and place.wake_at_ns is not None:
            now_ns = place.wake_at_ns
            feed(place, now_ns, Tick(), Up(1), Exited(code, ""))
    return place


def rule(action: FailureAction, *codes: int) -> FailureRuleSettings:
    return FailureRuleSettings(action, codes, ())


@pytest.mark.parametrize(
    ("code", "rules", "restarts"),
    [
        (75, [], 1),
        (75, [rule(FailureAction.IGNORE, 75)], 3),
        (76, [rule(FailureAction.IGNORE, 75)], 1),
        (-SIGKILL, [rule(FailureAction.IGNORE, 137)], 3),
        (75, [rule(FailureAction.COUNT, 75), rule(FailureAction.IGNORE, 75)], 1),
        (2, [], 0),
        (2, [rule(FailureAction.COUNT, 2)], 1),
        (2, [rule(FailureAction.IGNORE, 2)], 3),
    ],
)
def test_failure_rules_decide_whether_a_rank_is_restarted(
    code: int, rules: list[FailureRuleSettings], restarts: int
) -> None:
    place = failing(code, *rules)
    assert place.restarts == restarts
    assert (place.ended is None) is (restarts == 3)


def test_ignored_failures_still_increase_the_backoff() -> None:
    ignored = rule(FailureAction.IGNORE, 75)
    due_ns = [failing(75, ignored, times=n).wake_at_ns or 0 for n in range(4)]
    assert [b - a for a, b in itertools.pairwise(due_ns)] == [1 * S, 2 * S, 4 * S]


@given(lives=st.lists(st.integers(0, 2 * HEALTHY_NS), max_size=12), limit=st.integers(0, 5))
def test_only_consecutive_failures_count_toward_the_backoff_limit(
    lives: list[int], limit: int
) -> None:
    """The oracle is the number of deaths since the last process that lived long enough."""
    place = Place(0, 0, 0, RankLimits(limit, 0))
    now_ns = row = 0
    for life_ns in lives:
        feed(place, now_ns, Tick(), Up(1))
        now_ns += life_ns
        row = 1 if life_ns >= HEALTHY_NS else row + 1
        feed(place, now_ns, Exited(1, ""))
        assert (place.ended is not None) == (row > limit)
        if place.ended is not None:
            assert f"failure {row}, backoffLimit {limit}" in place.ended.message
            return
        assert place.wake_at_ns == now_ns + backoff_ns(row)
        now_ns = place.wake_at_ns


@given(
    st.lists(
        st.sampled_from(
            [
                *(
                    Tick(),
                    ProcessDrain("SIGTERM"),
                    JobShutdown("over"),
                    JobClosing(),
                    Kill("silent"),
                ),
                *("up", "exit", "die"),
            ]
        ),
        max_size=30,
    )
)
def test_each_process_is_launched_and_reported_once_under_any_events(events: list[object]) -> None:
    place = Place(0, 0, 0, LIMITS)
    effects: list[Effect] = []
    now_ns = 0
    for event in events:
        now_ns += 5 * S
        if event == "up":
            if place.phase is not PlacePhase.STARTING:
                continue
            event = Up(1)
        elif event in ("exit", "die"):
            if place.phase in (PlacePhase.WAITING, PlacePhase.ENDED):
                continue
            event = Exited(0 if event == "exit" else -9, "")
        assert isinstance(event, Event)
        effects += place.handle(now_ns, event)
    launched = [effect.member for effect in effects if isinstance(effect, Launch)]
    reported = [
        effect.message.member
        for effect in effects
        if isinstance(effect, Report) and isinstance(effect.message, RankDead)
    ]
    assert len(set(launched)) == len(launched)
    assert reported == place.dead == launched[: len(reported)]
    assert len(launched) - len(reported) in (0, 1)
    assert (place.ended is not None) == (place.phase is PlacePhase.ENDED)
    if place.phase in (PlacePhase.STARTING, PlacePhase.WAITING, PlacePhase.DRAINING):
        assert place.wake_at_ns is not None, "nothing waits without a deadline"


def test_a_second_sigterm_neither_repeats_nor_shortens_the_drain() -> None:
    place = make_place(PlacePhase.RUNNING)
    feed(place, 0, ReportedOutcome(RankOutcome.PRESENT, ""))
    assert feed(place, 1 * S, ProcessDrain("SIGTERM")) == [
        Command(place.member, "drain", "SIGTERM")
    ]
    assert feed(place, 2 * S, ProcessDrain("SIGTERM")) == []
    assert place.wake_at_ns == 31 * S
    [kill] = feed(place, 31 * S, Tick())
    assert kill == SendKill(place.member, "it did not leave in time (SIGTERM)")
    [dead] = feed(place, 31 * S, Exited(-SIGKILL, ""))
    assert isinstance(dead, Report)
    assert place.ended is not None
    assert (place.ended.end, place.ended.exit_code) == (EndKind.DRAINED, 1)


def test_a_shutdown_shortens_a_drain() -> None:
    place = make_place(PlacePhase.DRAINING)
    feed(place, 0, ReportedOutcome(RankOutcome.PRESENT, ""))
    assert feed(place, 1 * S, JobShutdown("over")) == [Command(place.member, "shutdown", "over")]
    assert place.wake_at_ns == 1 * S + SHUTDOWN_NS
    feed(place, 1 * S + SHUTDOWN_NS, Tick(), Exited(-SIGKILL, ""))
    assert place.ended is not None
    assert (place.ended.end, place.ended.exit_code) == (EndKind.DRAINED, 0)


def test_a_shutdown_kills_a_rank_that_took_no_part_at_once() -> None:
    """The script of such a rank is still importing.

    Nothing is expected from it, so this is not a failure.
    """
    for before in (PlacePhase.RUNNING, PlacePhase.DRAINING):
        place = Place(1, 0, 0, LIMITS)
        feed(place, 0, Tick(), Up(4))
        if before is PlacePhase.DRAINING:
            feed(place, 0, ProcessDrain("SIGTERM"))
        assert feed(place, 1 * S, JobShutdown("Complete")) == [SendKill(place.member, "Complete")]
        feed(place, 1 * S, Exited(-SIGKILL, ""))
        assert place.ended is not None
        assert (place.ended.end, place.ended.exit_code) == (EndKind.DRAINED, 0)


FINISHED = ReportedOutcome(RankOutcome.FINISHED, "", (GEN_1, 9))
PRESENT = ReportedOutcome(RankOutcome.PRESENT, "")


@pytest.mark.parametrize(
    ("phase", "events"),
    [
        (PlacePhase.RUNNING, [FINISHED]),
        (PlacePhase.RUNNING, [FINISHED, JobClosing()]),
        (PlacePhase.RUNNING, [PRESENT, JobClosing(), FINISHED]),
        (PlacePhase.RUNNING, [FINISHED, JobShutdown("the run has ended")]),
        (PlacePhase.RUNNING, [FINISHED, ProcessDrain("SIGTERM"), JobShutdown("over")]),
        (PlacePhase.DRAINING, [FINISHED]),
        (PlacePhase.DRAINING, [FINISHED, JobShutdown("over"), ProcessDrain("SIGTERM")]),
    ],
)
def test_the_script_of_a_released_rank_is_killed_after_finish_ns(
    phase: PlacePhase, events: list[Event]
) -> None:
    """No event shortens or removes the deadline.

    An endless loop after the training once kept the agent of a killed run alive.
    """
    place = make_place(phase, RankLimits(3, 30 * S, finish_ns=100 * S))
    feed(place, 50 * S, *events)
    assert feed(place, 150 * S - 1, Tick()) == []
    [kill] = feed(place, 150 * S, Tick())
    assert kill == SendKill(
        place.member, "its script was still running 100 s after the job was complete"
    )
    [dead] = feed(place, 151 * S, Exited(-SIGKILL, ""))
    assert isinstance(dead, Report)
    assert isinstance(dead.message, RankDead)
    assert dead.message.released == (GEN_1, 9)
    assert place.ended is not None
    assert (place.ended.end, place.ended.exit_code) == (EndKind.FINISHED, 0), "Complete stays so"
    assert "cut short" in place.ended.message


def test_a_rank_that_never_accepts_its_release_is_killed() -> None:
    place = make_place(PlacePhase.RUNNING, RankLimits(3, 30 * S, finish_ns=100 * S))
    feed(place, 0, PRESENT, JobClosing())
    [kill] = feed(place, 100 * S, Tick())
    assert isinstance(kill, SendKill)


def test_a_dismissed_rank_whose_script_does_not_return_is_killed_for_good() -> None:
    place = make_place(PlacePhase.RUNNING)
    feed(place, 0, ReportedOutcome(RankOutcome.DISMISSED, "left out"))
    [kill] = feed(place, DISMISSED_NS, Tick())
    assert isinstance(kill, SendKill)
    feed(place, DISMISSED_NS, Exited(-SIGKILL, ""))
    assert place.ended is not None
    assert (place.ended.end, place.ended.exit_code) == (EndKind.DRAINED, 0)


def test_a_start_that_hangs_is_killed_and_retried() -> None:
    place = make_place(PlacePhase.STARTING)
    [kill] = feed(place, START_NS, Tick())
    assert isinstance(kill, SendKill)
    [dead] = feed(place, START_NS, NeverStarted("its launcher ended"))
    assert isinstance(dead, Report)
    assert place.phase is PlacePhase.WAITING


def test_a_process_that_never_started_matches_no_exit_code_rule() -> None:
    limits = RankLimits(restarts_max=0, rules=(rule(FailureAction.IGNORE, 1),), drain_ns=30 * S)
    never, failed = make_place(PlacePhase.STARTING, limits), make_place(PlacePhase.RUNNING, limits)
    feed(never, 0, NeverStarted("its launcher ended"))
    feed(failed, 0, Exited(1, ""))
    assert (never.phase, failed.phase) == (PlacePhase.ENDED, PlacePhase.WAITING)


def test_a_drain_before_the_start_exits_with_code_0() -> None:
    for phase in (PlacePhase.STARTING, PlacePhase.WAITING):
        place = make_place(phase)
        feed(place, 0, ProcessDrain("scale-down"))
        if place.phase is PlacePhase.KILLED:
            feed(place, 0, NeverStarted("its launcher ended"))
        assert place.ended is not None
        assert (place.ended.end, place.ended.exit_code) == (EndKind.DRAINED, 0)


def test_the_attempt_number_of_a_pod_never_reaches_that_of_the_next_pod() -> None:
    place = Place(0, 0, 3, RankLimits(10**9, 0))
    for _ in range(ATTEMPT_STRIDE):
        assert place.ended is None
        feed(place, place.wake_at_ns or 0, Tick(), Exited(1, ""))
    assert place.ended is not None
    assert place.member.attempt == 4 * ATTEMPT_STRIDE - 1


@pytest.mark.parametrize("phase", [PlacePhase.WAITING, PlacePhase.STARTING, PlacePhase.RUNNING])
def test_no_process_is_started_after_the_release(phase: PlacePhase) -> None:
    """A process that waits for its start or has just started is no longer needed (R17)."""
    place = make_place(phase)
    effects = feed(place, 0, JobClosing())
    if phase is not PlacePhase.WAITING:
        assert [type(e) for e in effects] == [SendKill]
        feed(place, 0, Exited(-9, ""))
    assert place.ended is not None
    assert (place.ended.end, place.ended.exit_code) == (EndKind.DRAINED, 0)


def test_a_rank_in_the_release_ends_by_itself_and_is_not_restarted() -> None:
    place = make_place(PlacePhase.RUNNING)
    assert feed(place, 0, ReportedOutcome(RankOutcome.PRESENT, ""), JobClosing()) == []
    assert place.wake_at_ns == LIMITS.finish_ns, "nothing waits without a deadline"
    [report] = feed(place, 0, Exited(-9, ""))
    assert isinstance(report, Report)
    assert isinstance(report.message, RankDead)
    assert not report.message.restarts
    assert place.ended is not None
    assert (place.ended.end, place.ended.exit_code) == (EndKind.DRAINED, 0)


def death(**facts: Any) -> Death:
    given_facts = {
        "member": MemberId(0, 0, 0),
        "code": 1,
        "text": "",
        "outcome": None,
        "message": "",
        "kill_why": "",
        "leaving": "",
    }
    return Death(**{**given_facts, **facts})


@pytest.mark.parametrize(
    ("facts", "end", "why"),
    [
        ({"code": 0, "outcome": RankOutcome.FINISHED}, (EndKind.FINISHED, 0), ""),
        ({"code": 0, "outcome": RankOutcome.DISMISSED}, (EndKind.DRAINED, 0), ""),
        ({"code": 0}, (EndKind.FAILED, 1), "ScriptTookNoPart"),
        ({"code": 0, "outcome": RankOutcome.PRESENT}, (EndKind.FAILED, 1), "ScriptEndedEarly"),
        ({"code": 0, "outcome": RankOutcome.PRESENT}, (EndKind.FAILED, 1), "pl.steps"),
        ({"code": 0, "outcome": RankOutcome.PRESENT}, (EndKind.FAILED, 1), "pl.stop()"),
        ({"code": 0, "outcome": RankOutcome.FAILED, "message": "lr"}, (EndKind.FAILED, 1), "lr"),
        ({"code": 2}, (EndKind.FAILED, 2), "exit code 2"),
        (
            {"code": 127, "outcome": RankOutcome.UNSTARTABLE, "message": "none"},
            (EndKind.FAILED, 2),
            "none",
        ),
        ({"code": 1, "text": "KeyError"}, None, "exit code 1; last lines:\nKeyError"),
        ({"code": -6, "text": "free(): bad"}, None, "(SIGABRT); last lines:\nfree(): bad"),
        ({"code": 1, "outcome": RankOutcome.FAILED, "message": "raised"}, None, "raised"),
        ({"code": -15}, None, "signal 15 (SIGTERM)"),
        ({"code": None, "text": "no mpiexec"}, None, "it could not be started: no mpiexec"),
        ({"code": -9, "kill_why": "silent"}, None, "killed by its agent: silent"),
        ({"code": -9, "leaving": "over"}, (EndKind.DRAINED, 0), "signal 9 (SIGKILL)"),
        (
            {"code": -9, "outcome": RankOutcome.PRESENT, "leaving": "SIGTERM"},
            (EndKind.DRAINED, 1),
            "signal 9 (SIGKILL)",
        ),
        (
            {"code": -9, "outcome": RankOutcome.PRESENT, "leaving": "Complete", "over": True},
            (EndKind.DRAINED, 0),
            "signal 9 (SIGKILL)",
        ),
        (
            {"code": 1, "outcome": RankOutcome.FINISHED},
            (EndKind.FAILED, 1),
            "after the job was over",
        ),
        (
            {"code": -9, "outcome": RankOutcome.FINISHED},
            (EndKind.FINISHED, 0),
            "its script was cut short after the job was over: signal 9",
        ),
        (
            {"code": 1, "outcome": RankOutcome.DISMISSED, "leaving": "x"},
            (EndKind.DRAINED, 1),
            "code 1",
        ),
    ],
)
def test_an_exit_is_mapped_to_its_end_and_reason(
    facts: dict[str, object], end: tuple[EndKind, int] | None, why: str
) -> None:
    ended = last_end(death(**facts))
    assert (ended and (ended.end, ended.exit_code)) == end
    assert why in why_it_ended(death(**facts))
    assert bool(why) == bool(why_it_ended(death(**facts)))


def test_only_sigkill_suggests_running_out_of_memory() -> None:
    assert "memory" in how_it_ended(-SIGKILL)
    assert "memory" not in how_it_ended(-SIGTERM)
    assert how_it_ended(-63) == "signal 63 (unknown signal)"


def test_the_first_failure_decides_the_end_of_the_pod() -> None:
    places = [make_place(PlacePhase.RUNNING) for _ in range(3)]
    feed(places[0], 0, ReportedOutcome(RankOutcome.FINISHED, ""), Exited(0, ""))
    assert pod_end(places) is None
    assert reason_to_leave(places) == ""
    feed(places[1], 0, Exited(2, ""))
    assert "exit code 2" in reason_to_leave(places)
    feed(places[2], 0, ProcessDrain("x"), ReportedOutcome(RankOutcome.DISMISSED, ""), Exited(0, ""))
    ended = pod_end(places)
    assert ended is not None
    assert (ended.end, ended.exit_code) == (EndKind.FAILED, 2)
    assert pod_end([places[0], places[2]]) == PlaceEnd(EndKind.FINISHED, "", 0)


def test_output_before_a_sigkill_is_not_given_as_the_reason() -> None:
    """SIGKILL leaves no time for a message, so the last lines may be hours old."""
    killed = why_it_ended(death(code=-9, text="UserWarning: a warning from the first epoch"))
    assert "SIGKILL" in killed
    assert "UserWarning" not in killed


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"code": 2}, "ScriptFailed"),
        ({"code": 127, "outcome": RankOutcome.UNSTARTABLE}, "RankFailed"),
    ],
)
def test_a_script_is_blamed_only_if_it_ran(facts: dict[str, object], reason: str) -> None:
    """The coordinator gives the same reason, whichever of the two is heard of first."""
    ended = last_end(death(**facts))
    assert ended is not None
    assert ended.reason == reason
