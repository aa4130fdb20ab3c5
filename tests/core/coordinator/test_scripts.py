"""Script failures: some of them end a job, and none is forgotten (R55)."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest
from msgspec.structs import replace
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.agent.exits import EXIT_AGAIN
from paceline.core.coordinator import ending, scripts
from paceline.core.coordinator.report import status
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import batches_of
from paceline_api.errors import EXIT_BAD_INPUT
from paceline_api.ids import MemberId
from paceline_api.settings import FailureRuleSettings
from paceline_api.types.enums import FailureAction

from testing.makers import PLAN
from tests.core.coordinator.test_coordinator import (
    FORMED,
    A,
    B,
    C,
    Desk,
    prepared,
    register,
    rule,
)

BAD = m.ScriptError("OSError", "[Errno 5] bad sector", "/job/train.py", 7)
OTHER = replace(BAD, line=8)
FIRST, SECOND = m.DealtBatch(0, 0), m.DealtBatch(1, 0)


def trained(*rules: FailureRuleSettings, max_skipped: int = 0) -> Desk:
    desk = Desk(replicas=3, rules=rules, max_skipped=max_skipped)
    desk.pods(0, 1, 2)
    desk.form(A, B, C)
    desk.state.had_state = True
    return desk


def dies(
    desk: Desk,
    who: MemberId,
    error: m.ScriptError | None = BAD,
    batch: m.DealtBatch | None = None,
    code: int = 1,
    restarts: bool = True,
) -> None:
    why = f"{error}; last lines:\nTraceback" if error is not None else f"exit code {code}"
    dead = m.RankDead(who, code, why, restarts, error=error, batch=batch)
    desk.post(coord.FromAgent(dead))


def end(desk: Desk) -> tuple[str, str]:
    outcome = desk.state.outcome
    return (outcome.reason, outcome.message) if outcome is not None else ("", "")


def test_the_same_exception_at_the_same_line_on_a_second_rank_fails_the_job() -> None:
    desk = trained()
    dies(desk, A, replace(BAD, message="bad sector 1"), FIRST)
    assert desk.state.outcome is None, "one rank may be an accident"
    dies(desk, B, BAD, SECOND)
    reason, message = end(desk)
    assert reason == "ScriptFailed"
    first = message.splitlines()[0]
    for part in ("OSError: [Errno 5] bad sector (/job/train.py, line 7)", str(A), str(B)):
        assert part in first
    for batch in (FIRST, SECOND):
        numbers = batches_of(PLAN, batch.lease)[batch.part]
        assert f"samples {', '.join(map(str, numbers))}" in first
    assert message.splitlines()[1:] == ["Traceback"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((BAD, 1), (OTHER, 1)),
        ((None, -11), (None, -11)),
        ((None, 3), (BAD, 1)),
        ((None, 3), (None, 4)),
    ],
)
def test_a_second_failure_on_the_same_batch_fails_the_job(
    first: tuple[m.ScriptError | None, int], second: tuple[m.ScriptError | None, int]
) -> None:
    """The cause may be an exception at another line, a crash or an exit code.

    The second failure may come from the same place, because its batch is dealt to it again.
    """
    for who in (B, A._replace(attempt=1)):
        desk = trained()
        dies(desk, A, first[0], FIRST, first[1])
        desk.post(coord.FromAgent(m.RankStarted(who, 7)))
        dies(desk, who, second[0], FIRST, second[1])
        assert end(desk)[0] == "ScriptFailed"


@pytest.mark.parametrize(
    ("second", "batch", "code"),
    [
        (OTHER, SECOND, 1),
        (replace(BAD, type="KeyError"), SECOND, 1),
        (replace(BAD, file=""), SECOND, 1),
        (None, FIRST, -9),
        (None, FIRST, -15),
        (None, None, 3),
    ],
)
def test_two_unrelated_failures_do_not_fail_the_job(
    second: m.ScriptError | None, batch: m.DealtBatch | None, code: int
) -> None:
    """The second failure has another line, another exception, or an external signal."""
    desk = trained()
    dies(desk, A, BAD, FIRST)
    dies(desk, B, second, batch, code)
    assert desk.state.outcome is None


def test_one_place_may_raise_at_the_same_line_again() -> None:
    """The limit for such failures is backoffLimit."""
    desk = trained()
    dies(desk, A, BAD, FIRST)
    dies(desk, A._replace(attempt=1), BAD, SECOND)
    assert desk.state.outcome is None


@pytest.mark.parametrize("action", [FailureAction.COUNT, FailureAction.IGNORE])
def test_a_rule_for_the_exit_code_takes_precedence(action: FailureAction) -> None:
    desk = trained(rule(action, 1))
    dies(desk, A)
    dies(desk, B)
    assert desk.state.outcome is None


def test_failures_after_the_last_round_do_not_fail_the_job() -> None:
    desk = trained()
    assert desk.state.gen is not None
    desk.say(m.Stopped(desk.state.gen.id, C, 9))
    dies(desk, A)
    dies(desk, B)
    assert desk.state.outcome is None


def test_exit_code_2_fails_the_job_at_once() -> None:
    """The rank's agent reports it as well, but a small job may be complete by then."""
    desk = trained()
    dies(desk, A, None, None, EXIT_BAD_INPUT, restarts=False)
    assert end(desk) == ("ScriptFailed", f"rank {A}: exit code 2")


def test_a_rank_that_cannot_be_started_fails_the_job_as_its_agent_says() -> None:
    """No script ran, so none is blamed."""
    desk = trained()
    desk.post(coord.FromAgent(m.AgentDone(0, 0, "failed", f"rank {A}: no such file: train")))
    assert end(desk) == ("RankFailed", f"rank {A}: no such file: train")


def test_state_lost_by_script_failures_is_reported_as_script_failed() -> None:
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.form(A, B)
    desk.state.had_state = True
    dies(desk, A, BAD, FIRST)
    dies(desk, B, OTHER, SECOND)
    for who in (A._replace(attempt=1), B._replace(attempt=1)):
        desk.post(coord.FromAgent(m.RankStarted(who, 7)))
    ending.fail(desk.state, "StateLost", "all ranks are lost")
    reason, message = end(desk)
    assert reason == "ScriptFailed"
    for part in ("line 7", "line 8", str(A), str(B), "all ranks are lost"):
        assert part in message.splitlines()[0]


def test_state_lost_partly_by_a_kill_is_reported_as_state_lost() -> None:
    desk = trained()
    dies(desk, A)
    dies(desk, B, None, None, -9)
    ending.fail(desk.state, "StateLost", "all ranks are lost")
    assert end(desk) == ("StateLost", "all ranks are lost")


def test_a_complete_job_reports_the_script_failures_on_the_way() -> None:
    desk = trained()
    dies(desk, A, BAD, FIRST)
    assert desk.state.gen is not None
    at = desk.state.gen.id
    for who in (B, C):
        desk.say(m.Stopped(at, who, 9))
    ending.release(desk.state, at, 9)
    dies(desk, A._replace(attempt=1), OTHER, None, restarts=False)
    for who in (B, C):
        desk.post(coord.FromAgent(m.RankDead(who, 0, "", False, (at, 9))))
    reason, message = end(desk)
    assert reason == "Complete"
    assert "the script failed 2 times" in message
    for part in (str(BAD), str(OTHER), str(A)):
        assert part in message
    messages = [one.message for one in desk.state.history.entries if one.reason == "RankDied"]
    assert len(messages) == 2, "each has its event, in whichever phase it was"
    assert [one.what for one in status(desk.state).script_failures] == [str(BAD), str(OTHER)]


def test_a_new_coordinator_learns_earlier_failures_from_the_agents() -> None:
    desk = Desk(replicas=3)
    desk.pods(0, 1, 2)
    earlier = m.RankDead(A, 1, str(BAD), True, error=BAD)
    hello = m.AgentHello(0, 0, "h", "", (), (A,), failures=(earlier,))
    for _ in range(2):  # Counted once, however often a pod sends its hello.
        desk.post(coord.FromAgent(hello))
    assert desk.state.scripts_failed == 1
    desk.state.had_state = True
    dies(desk, B)
    assert end(desk)[0] == "ScriptFailed"


def test_rounds_reported_only_with_a_crash_count_as_training() -> None:
    """A crash in the fourth batch is not a crash before the first round."""
    desk = Desk(replicas=2)
    desk.pods(0, 1)
    desk.form(A, B)
    desk.post(coord.FromAgent(m.RankDead(A, 1, str(BAD), True, error=BAD, version=3)))
    assert desk.state.outcome is None
    assert desk.state.had_state


# ---- skipped batches (R56) -----------------------------------------------------------------------


def goes_on(desk: Desk, *who: MemberId, skips: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Let the ranks report what their log skips, and return what the next generation skips."""
    assert desk.state.gen is not None
    last = desk.state.gen.id
    desk.post(coord.Tick(), 200)
    facts = {"last": last, "has_state": True, "skips": skips, **dict.fromkeys(PARTS, (A, B, C))}
    for each in who:
        desk.say(prepared(each, desk.state.proposal, **facts))
    assert end(desk)[0] or desk.state.gen.id > last
    return desk.state.gen.skips or ()


PARTS = ("members", "with_state", "active", "gen_active")


def skip_messages(desk: Desk) -> list[str]:
    return [one.message for one in desk.state.history.entries if one.reason == "BatchSkipped"]


def test_a_batch_on_which_two_processes_failed_is_skipped() -> None:
    desk = trained(max_skipped=1)
    dies(desk, A, BAD, FIRST)
    assert scripts.to_skip(desk.state, ()) == ()
    dies(desk, B, replace(BAD, message="bad sector 2"), FIRST)
    assert desk.state.outcome is None
    assert goes_on(desk, C) == (FIRST.lease,)
    [event] = skip_messages(desk)
    numbers = batches_of(PLAN, FIRST.lease)[FIRST.part]
    for part in (str(BAD.file), str(A), str(B), f"samples {', '.join(map(str, numbers))}", "1 of"):
        assert part in event


def test_a_bad_batch_fails_the_job_if_no_batch_may_be_skipped() -> None:
    desk = trained(max_skipped=0)
    dies(desk, A, BAD, FIRST)
    dies(desk, B, BAD, FIRST)
    assert end(desk)[0] == "ScriptFailed"


def test_failures_at_one_line_fail_the_job_only_outside_of_a_batch() -> None:
    """Each of these failures may be the first one on a bad batch.

    A failure outside of any batch is an error of the script.
    """
    desk = trained(max_skipped=1)
    dies(desk, A, BAD, FIRST)
    dies(desk, B, BAD, SECOND)
    assert desk.state.outcome is None
    dies(desk, C, BAD, None)
    assert end(desk)[0] == "ScriptFailed"


def test_one_bad_batch_more_than_allowed_fails_the_job() -> None:
    desk = trained(max_skipped=1)
    dies(desk, A, BAD, FIRST)
    dies(desk, B, BAD, FIRST)
    dies(desk, A._replace(attempt=1), BAD, SECOND)
    assert desk.state.outcome is None
    dies(desk, B._replace(attempt=1), BAD, SECOND)
    assert end(desk)[0] == "ScriptFailed"


def test_batches_skipped_in_the_log_count_for_a_new_coordinator() -> None:
    """A new coordinator learns failures from the agents, and skipped batches from the log."""
    for skips, most, skipped in (((7,), 2, (FIRST.lease,)), ((FIRST.lease,), 1, ())):
        desk = trained(max_skipped=most)
        for slot, who in enumerate((A, B)):
            dead = m.RankDead(who, 1, str(BAD), True, error=BAD, batch=FIRST)
            hello = m.AgentHello(slot, 0, "h", "", (), (who,), failures=(dead,))
            desk.post(coord.FromAgent(hello))
        assert goes_on(desk, C, skips=skips) == skipped
        assert desk.state.skips == {*skips, *skipped}
        assert len(skip_messages(desk)) == len(skipped), "told once"
    desk = trained(max_skipped=1)
    for who in (A, B):
        dies(desk, who, BAD, FIRST)
    goes_on(desk, C, skips=(7,))
    assert end(desk)[0] == "ScriptFailed"


def test_a_failure_matched_by_an_exit_code_rule_skips_no_batch() -> None:
    desk = trained(rule(FailureAction.COUNT, 1), max_skipped=1)
    dies(desk, A, BAD, FIRST)
    dies(desk, B, BAD, FIRST)
    assert scripts.to_skip(desk.state, ()) == ()


def test_a_failure_in_the_first_batch_does_not_fail_the_job_at_once() -> None:
    desk = Desk(replicas=3, max_skipped=1)
    desk.pods(0, 1, 2)
    desk.form(A, B, C)
    dies(desk, A, BAD, FIRST)
    assert desk.state.outcome is None
    other = Desk(replicas=3, max_skipped=1)
    other.pods(0, 1, 2)
    other.form(A, B, C)
    dies(other, A, BAD, None)
    assert end(other)[0] == "ScriptFailed"


def unchanged(*rules: FailureRuleSettings) -> Desk:
    """Return a desk of a job whose script runs unchanged, with three ranks that train."""
    desk = Desk(replicas=3, rules=rules)
    desk.pods(0, 1, 2)
    desk.form(A, B, C, plan=DataPlan(slots=3))
    desk.state.had_state = True
    return desk


AGAIN = B._replace(attempt=B.attempt + 1)
"""The process that is started in the place of B."""


def agree(desk: Desk) -> None:
    """Let A and C go on without B."""
    before = desk.state.gen
    assert before is not None
    desk.post(coord.Tick(), 500)
    for who in (A, C):
        desk.say(prepared(who, desk.state.proposal, last=before.id, has_state=True, **FORMED))
    for who in (A, C):
        desk.say(m.Started(desk.state.proposal, who, True))


def begins_again(desk: Desk, *, outside: bool) -> None:
    """Let another process take the place of B, and end there, outside of the group or in it."""
    desk.say(register(AGAIN, plan=DataPlan(slots=3)))
    at = desk.state.proposal
    desk.say(m.Heartbeat(AGAIN, at, at, 9, active=not outside, done=True, outside=outside))


def finish(desk: Desk, *who: MemberId) -> None:
    """Release these ranks, and let them end in order."""
    at = desk.state.gen.id if desk.state.gen is not None else desk.state.proposal
    ending.release(desk.state, at, 9)
    for each in who:
        desk.post(coord.FromAgent(m.RankDead(each, 0, "", False, (at, 9))))


def test_a_script_that_runs_unchanged_is_not_complete_without_a_slot_on_which_it_failed() -> None:
    desk = unchanged()
    dies(desk, B)
    finish(desk, A, C)
    reason, message = end(desk)
    assert reason == "ScriptFailed"
    assert message.startswith(f"OSError: [Errno 5] bad sector (/job/train.py, line 7) on rank {B};")


def test_the_job_is_complete_if_another_process_has_ended_in_the_slot_that_failed() -> None:
    desk = unchanged()
    dies(desk, B)
    begins_again(desk, outside=False)
    finish(desk, A, C, AGAIN)
    assert end(desk)[0] == "Complete"


def test_a_slot_that_nobody_can_take_ends_the_job_at_once_with_the_error_of_the_script() -> None:
    desk = unchanged()
    dies(desk, B)
    agree(desk)
    begins_again(desk, outside=True)
    reason, message = end(desk)
    assert reason == "ScriptFailed"
    assert message.startswith(f"OSError: [Errno 5] bad sector (/job/train.py, line 7) on rank {B};")


def test_a_mistake_in_the_place_of_a_rank_that_failed_does_not_hide_its_error() -> None:
    desk = unchanged()
    dies(desk, B)
    agree(desk)
    desk.say(register(AGAIN, plan=DataPlan(slots=3)))
    dies(desk, AGAIN, None, code=EXIT_BAD_INPUT, restarts=False)
    reason, message = end(desk)
    assert reason == "ScriptFailed"
    assert message == (
        f"OSError: [Errno 5] bad sector (/job/train.py, line 7) on rank {B}; in its place rank "
        f"{AGAIN}: exit code 2"
    )


@pytest.mark.parametrize("signal", [SIGKILL, SIGTERM])
def test_a_rank_that_was_killed_from_outside_never_fails_its_script(signal: int) -> None:
    desk = unchanged()
    dies(desk, B, None, code=-signal)
    agree(desk)
    begins_again(desk, outside=True)
    assert desk.state.outcome is None
    finish(desk, A, C, AGAIN)
    assert end(desk)[0] == "Complete"


def test_a_rule_of_the_user_allows_a_failed_slot_at_the_end() -> None:
    desk = unchanged(rule(FailureAction.IGNORE, 7))
    dies(desk, B, None, code=7)
    agree(desk)
    begins_again(desk, outside=True)
    assert desk.state.outcome is None
    finish(desk, A, C, AGAIN)
    assert end(desk)[0] == "Complete"


def test_a_rank_that_starts_its_script_again_has_not_failed() -> None:
    desk = unchanged()
    dies(desk, B, None, code=EXIT_AGAIN)
    finish(desk, A, C)
    assert end(desk)[0] == "Complete"


def test_a_job_whose_data_are_dealt_is_complete_without_a_rank_that_failed() -> None:
    desk = trained()
    dies(desk, B)
    finish(desk, A, C)
    assert end(desk)[0] == "Complete"
