"""Output of `paceline explain`, and the rendering of log lines, columns and ages."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.jobs.core import rendering
from paceline.jobs.core.explain import COMMANDS_MAX, WORDS_MAX, explain
from paceline.jobs.interface import Explanation, JobEvent, JobStatus, LogLine
from paceline_api.errors import printable_lines
from paceline_api.ids import MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.status import (
    LiveCondition,
    LogStatus,
    RankPhase,
    RankStatus,
    ScriptFailure,
    Status,
    StragglerStatus,
)
from paceline_api.types.enums import Mode


def status(state: str = "Training", **more: Any) -> JobStatus:
    fields = {"name": "digits", "place": "team", "replicas": 2, "ready": 2, **more}
    return JobStatus(state=state, **fields)


def explained(job: JobStatus, *events: JobEvent, cluster: bool = True) -> Explanation:
    return explain(job, events, flags=" -n team" if cluster else "", cluster=cluster)


def rank(slot: int, state: RankPhase = RankPhase.ACTIVE, why: str = "") -> RankStatus:
    return RankStatus(MemberId(slot, 0, 1000), state, host=f"node{slot}", why=why)


def test_a_healthy_job_has_nothing_that_holds_it_up() -> None:
    explanation = explained(status(rounds_per_s_now=2.5))
    assert explanation.verdict == (
        "It trains with all 2 replicas, 2.5 rounds/s now; nothing holds it up."
    )
    assert explanation.commands[0] == "paceline status digits -n team --watch"


def test_a_slow_rank_is_named_with_its_node() -> None:
    slow = StragglerStatus(MemberId(1, 0, 1000), 210, 0.0, "Replace")
    detail = Status("digits", "", ranks=(rank(0), rank(1)), stragglers=(slow,))
    explanation = explained(status(detail=detail))
    assert "rank 1 holds it up: its step takes 210 %" in explanation.verdict
    assert explanation.because == ("rank 1 on node1: 210 % of the median step; in force: Replace",)
    assert explanation.commands[0] == "paceline logs digits -n team --rank 1"


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        (RoundSettings(mode=Mode.FULL), True),
        (RoundSettings(mode=Mode.SHADOW), True),
        (RoundSettings(mode=Mode.DEADLINE, quorum=1), True),
        (RoundSettings(mode=Mode.QUORUM, quorum=2), True),
        (RoundSettings(mode=Mode.QUORUM, quorum_percent=100), True),
        (RoundSettings(mode=Mode.QUORUM, quorum=1), False),
        (RoundSettings(mode=Mode.QUORUM, quorum_percent=50), False),
        (RoundSettings(mode=Mode.MAJORITY), False),
        (RoundSettings(mode=Mode.SOLO), False),
    ],
)
def test_a_slow_rank_is_blamed_only_if_the_mode_waits_for_it(
    settings: RoundSettings, waits: bool
) -> None:
    slow = StragglerStatus(MemberId(1, 0, 1000), 210, 0.0, "Tolerate")
    detail = Status(
        "digits",
        "",
        ranks=(rank(0), rank(1)),
        stragglers=(slow,),
        settings=msgspec.to_builtins(settings),
    )
    verdict = explained(status(detail=detail)).verdict
    assert ("holds it up" in verdict) is waits
    assert ("nobody waits" in verdict) is not waits
    assert "rank 1" in verdict


LATE = {"samples_applied": 2128, "samples_late": 480, "avoided_s": 2.34}


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        ({"operations": {"step": 60, "call": 2}, **LATE}, "has saved 2.3 s of waiting"),
        (
            {"operations": {"step": 60, "call": 2}, **LATE},
            "480 of 2,128 samples came one step late",
        ),
        ({"operations": {"step": 60}}, "no rank was late"),
        ({"operations": {"step": 60, "call": 120}}, "makes 2.0 collective calls in each step"),
        ({"operations": {"step": 2, "settled": 58}}, "has a GradScaler"),
        ({}, ""),
    ],
)
@pytest.mark.parametrize("state", ["Training", "Complete"])
def test_explain_names_what_a_mode_gains_for_an_unchanged_script(
    log: dict[str, Any], wanted: str, state: str
) -> None:
    phase = RankPhase.FINISHED if state == "Complete" else RankPhase.ACTIVE
    settings = msgspec.to_builtins(RoundSettings(mode=Mode.QUORUM, quorum_percent=75))
    ranks = tuple(rank(slot, phase) for slot in range(4))
    explanation = explained(
        status(
            state, detail=Status("digits", "", ranks=ranks, settings=settings, log=LogStatus(**log))
        )
    )
    assert any(wanted in line for line in explanation.because) is bool(wanted)
    assert any("mode Quorum" in line for line in explanation.because) is bool(wanted)


def test_explain_names_no_gain_in_mode_full() -> None:
    detail = Status(
        "digits",
        "",
        ranks=(rank(0), rank(1)),
        settings=msgspec.to_builtins(RoundSettings(mode=Mode.FULL)),
        log=LogStatus(operations={"step": 60}),
    )
    assert explained(status(detail=detail)).because == ()


def test_a_slow_rank_of_an_unchanged_script_holds_the_others_up() -> None:
    """Every rank goes through every step, so the others wait for it one step later."""
    slow = StragglerStatus(MemberId(1, 0, 1000), 210, 0.0, "Tolerate")
    detail = Status(
        "digits",
        "",
        ranks=(rank(0), rank(1)),
        stragglers=(slow,),
        settings=msgspec.to_builtins(RoundSettings(mode=Mode.SOLO)),
        log=LogStatus(operations={"step": 60}),
    )
    assert "rank 1 holds it up" in explained(status(detail=detail)).verdict


def test_suggested_commands_are_quoted_for_the_shell() -> None:
    place = "/a path/it's here/runs/digits 1"
    for command in explained(status("Suspended", place=place), cluster=False).commands:
        words = shlex.split(command)
        assert words[0] == "paceline"
        assert words[2] == place


def test_a_complete_job_reports_script_failures() -> None:
    failed = ScriptFailure(MemberId(1, 0, 0), "KeyError: 'x' (a.py, line 3)", "samples 4, 5")
    explanation = explained(
        status("Complete", detail=Status("digits", "", script_failures=(failed,)))
    )
    assert explanation.because == (
        "the script failed on the way: KeyError: 'x' (a.py, line 3) on rank 1.0#0, samples 4, 5",
    )


def test_pods_that_do_not_start_are_explained_with_their_reason() -> None:
    waits = rank(1, RankPhase.STARTING, "ImagePullBackOff: no such image\nmore")
    also = rank(2, RankPhase.STARTING, "ImagePullBackOff: no such image\nelse")
    held = LiveCondition("Degraded", "PodNotStarting", "worker digits-1-1 does not start", 0.0)
    detail = Status("digits", "", ranks=(rank(0), waits, also), conditions=(held,))
    explanation = explained(
        status("PodNotStarting", ready=1, replicas=3, message=held.message, detail=detail),
        JobEvent(1.0, True, "Failed", "Error: ErrImagePull"),
        JobEvent(2.0, False, "Scheduled", "on node1"),
    )
    assert explanation.verdict == (
        "1 of 3 replicas take part (PodNotStarting): worker digits-1-1 does not start"
    )
    assert "ranks 1, 2: starting: ImagePullBackOff: no such image" in explanation.because
    assert "Failed: Error: ErrImagePull" in explanation.because
    assert not any("Scheduled" in why for why in explanation.because)
    assert explanation.commands[0] == "kubectl describe pod digits-1-1 -n team"


def test_a_failed_job_shows_its_message_and_hint() -> None:
    explanation = explained(
        status("Failed", message="rank 1 failed\nValueError: x", hint="mend the script")
    )
    assert explanation.verdict == "It has failed: rank 1 failed"
    assert explanation.because == ("ValueError: x", "mend the script")
    assert explanation.commands[0] == "paceline logs digits -n team --previous"


def test_commands_for_a_local_run_name_its_folder() -> None:
    explanation = explained(status("Suspended", place="/a/runs/digits-1"), cluster=False)
    assert explanation.commands[0] == "paceline resume /a/runs/digits-1"


STATES = ["Starting", "Training", "Resizing", "Suspending", "Suspended", "Deleting", "Complete"]
phases = st.sampled_from(list(RankPhase))
ranks = st.lists(phases, max_size=5).map(
    lambda drawn: tuple(rank(n, p) for n, p in enumerate(drawn))
)


@pytest.mark.long
@given(
    st.sampled_from([*STATES, "Failed", "QuotaExceeded"]),
    st.text(max_size=40),
    ranks,
    st.lists(st.booleans(), max_size=9),
    st.booleans(),
)
def test_every_state_gives_a_verdict_and_at_least_one_command(
    state: str, message: str, rows: tuple[RankStatus, ...], warnings: list[bool], cluster: bool
) -> None:
    detail = Status("digits", "", ranks=rows)
    events = [JobEvent(n, one, f"Reason{n}", "text") for n, one in enumerate(warnings)]
    answer = explained(status(state, message=message, detail=detail), *events, cluster=cluster)
    assert answer.verdict.strip()
    assert "\n" not in answer.verdict
    assert 1 <= len(answer.commands) <= COMMANDS_MAX
    assert len(set(answer.commands)) == len(answer.commands)
    words = [why for why in answer.because if why.startswith("Reason")]
    assert words == [f"Reason{n}: text" for n, one in enumerate(warnings) if one][-WORDS_MAX:]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (200, "3m20s"), (7500, "2h5m"), (4 * 86400 + 7 * 3600, "4d7h")],
)
def test_age_shows_at_most_two_units(seconds: float, text: str) -> None:
    assert rendering.age(seconds) == text


def test_log_lines_are_prefixed_with_rank_or_pod() -> None:
    line = LogLine(1_500_000_000, "digits-3-1", "3.0#1", 3, "loss 0.5")
    assert rendering.log_line(line, colour=False, times=False) == "rank 3 | loss 0.5"
    assert rendering.log_line(line, colour=False, times=True) == "00:00:01.500 rank 3 | loss 0.5"
    agent = LogLine(0, "digits-3-1", "", None, "drains")
    assert rendering.log_line(agent, colour=False, times=False) == "digits-3-1 | drains"


@given(st.integers(0, 10_000), st.text(max_size=20))
def test_color_does_not_change_the_text_of_a_log_line(number: int, text: str) -> None:
    line = LogLine(0, "digits-0-0", "", number, text)
    other = LogLine(0, "digits-0-0", "", number + 1, text)
    shown = rendering.log_line(line, colour=True, times=False)
    assert shown.endswith(f"rank {number} |\x1b[0m {printable_lines(text)}")
    assert shown[:5] != rendering.log_line(other, colour=True, times=False)[:5]


@given(st.lists(st.lists(st.text("ab ", max_size=5), min_size=3, max_size=3), min_size=1))
def test_columns_are_aligned(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row, line in zip(rows, rendering.columns(rows), strict=True):
        whole = line.ljust(sum(widths) + 4)
        assert whole[widths[0] + 2 :].startswith(row[1].rstrip())
