"""The parts of the local runner that only compute: run folders, timeline, summary and table."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from paceline.cli.table import line, table
from paceline.core.status import Fact
from paceline.local.report import summary, verdict
from paceline.local.rundir import RunDirError, make_run_dir
from paceline.local.slow import Replacer
from paceline.local.timeline import Timeline
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.settings import StragglerSettings
from paceline_api.status import (
    HistoryEntry,
    LogStatus,
    MembershipChange,
    Outcome,
    RankPhase,
    RankStatus,
    ShadowStatus,
    Status,
    StragglerStatus,
    place_of,
)
from paceline_api.types.enums import Mode, StragglerResponse
from rich.console import Console

S = 10**9
FIRST = GenerationId(1, "a", 1)
SECOND = GenerationId(2, "b", 1)


def change(generation: GenerationId, why: str, *, start_s: float | None = 0.25) -> MembershipChange:
    return MembershipChange(
        generation,
        reason="Died",
        why=why,
        members=2,
        version=7,
        wall_s=0.0,
        agree_s=0.1,
        start_s=start_s,
        gap_s=0.5,
    )


def status(version: int, *changes: MembershipChange, who: str = "a", happened: int = 0) -> Status:
    return Status(
        job="digits",
        coordinator=who,
        generation=FIRST,
        replicas=2,
        settings=msgspec.to_builtins(RoundSettings(mode=Mode.QUORUM)),
        version=version,
        changes=changes,
        history=tuple(HistoryEntry(n, 0.0, "R", f"{who}{n}") for n in range(1, happened + 1)),
        ranks=(
            RankStatus(
                MemberId(0, 0, 0),
                RankPhase.ACTIVE,
                rank=0,
                pid=41,
                version=version,
                facts={Fact.STEP_S: 0.0205, Fact.LAG_S: 0.001},
            ),
            RankStatus(MemberId(1, 0, 3), RankPhase.DEAD, why="exit code 1\nTraceback"),
        ),
        log=LogStatus(
            rounds={"quorum": version, "all": 0},
            gradients=2 * version,
            samples_applied=64 * version,
            samples_late=5,
            samples_dropped={"stale": 3, "nonfinite": 0},
            epochs_exact=2,
            progress=version / 100,
            shares={"0.0#0": 0.75},
        ),
    )


# ---- run folders ------------------------------------------------------------------------------


def test_run_folders_are_numbered_per_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_run_dir("job", None) == tmp_path / "runs" / "job-1"
    (tmp_path / "runs" / "job-7").mkdir()
    (tmp_path / "runs" / "job-x").mkdir()
    assert make_run_dir("job", None) == tmp_path / "runs" / "job-8"
    assert make_run_dir("jo", None) == tmp_path / "runs" / "jo-1"


def test_a_given_run_folder_must_be_new_or_empty(tmp_path: Path) -> None:
    new = tmp_path / "a" / "b"
    assert make_run_dir("job", new) == new
    with pytest.raises(RunDirError, match="belongs to another run"):
        make_run_dir("job", new)
    (tmp_path / "empty").mkdir()
    assert make_run_dir("job", tmp_path / "empty").is_dir()
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("precious")
    with pytest.raises(RunDirError, match="is not empty"):
        make_run_dir("job", full)
    assert [path.name for path in full.iterdir()] == ["mine.txt"]


def test_the_error_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunDirError, match="is a file"):
        make_run_dir("job", file)
    with pytest.raises(RunDirError, match="not a directory"):
        make_run_dir("job", file / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirError, match="permission denied"):
        make_run_dir("job", None)


# ---- timeline ---------------------------------------------------------------------------------


def test_speeds_count_from_the_first_generation_to_the_last_round() -> None:
    timeline = Timeline()
    timeline.add(status(0, change(FIRST, "start", start_s=None)), 0)
    assert timeline.elapsed_ns(5 * S) == 0
    timeline.add(status(0, change(FIRST, "start")), 10 * S)
    timeline.add(status(20, change(FIRST, "start")), 12 * S)
    timeline.add(status(40, change(FIRST, "start")), 14 * S)
    timeline.add(status(40, change(FIRST, "start")), 20 * S)
    assert timeline.elapsed_ns(15 * S) == 5 * S
    assert timeline.seconds == 4.0
    assert timeline.rounds_per_s == 10.0
    assert timeline.gradients_per_s == 20.0
    assert timeline.rounds_per_s_now == 0.0, "nothing happened in the last five seconds"


def test_the_empty_status_of_a_new_coordinator_does_not_change_the_speed() -> None:
    timeline = Timeline()
    timeline.add(status(0, change(FIRST, "start")), 0)
    timeline.add(status(20, change(FIRST, "start")), 2 * S)
    timeline.add(Status(job="digits", coordinator="b"), 2 * S + 1)
    timeline.add(status(30, who="b"), 3 * S)
    assert timeline.rounds_per_s_now == 10.0
    assert timeline.rounds_per_s == 10.0


def test_a_resumed_run_counts_only_its_own_rounds_and_gradients() -> None:
    """Resume at version 7 with 14 gradients.

    They used to be counted in the first seconds, before the ranks had reported anything.
    """
    timeline = Timeline()
    started = replace(change(FIRST, "it goes on from a checkpoint"), reason="First")
    assert started.version == 7
    timeline.add(Status("digits", "a", version=0, changes=(started,)), 0)
    for version, at_s in ((17, 1), (27, 2)):
        now = status(version, started)
        log = replace(now.log, gradients=2 * version, gradients_before=14)
        timeline.add(last := replace(now, log=log), at_s * S)
    assert (timeline.rounds_per_s, timeline.gradients_per_s) == (10.0, 20.0)
    assert timeline.rounds_per_s_now == 10.0
    text = "\n".join(summary(last, timeline))
    assert "rounds               20 in 2.0 s, after 7 of runs before" in text


def test_the_summary_shows_unknown_and_left_out_samples() -> None:
    now = status(66, change(FIRST, "start"))
    timeline = Timeline()
    timeline.add(now, 0)
    text = "\n".join(summary(replace(now, log=LogStatus()), timeline))
    assert "samples applied      not known: the job ended before a rank had told" in text
    log = replace(now.log, samples_left_out=26, epochs_exact=3)
    text = "\n".join(summary(replace(now, log=log), timeline))
    once = "3 with each sample applied exactly once; drop_last left out 26 samples of each"
    assert f"epochs               {once}" in text


def test_metrics_of_the_script_show_over_what_they_are_averaged() -> None:
    now = status(66, change(FIRST, "start"))
    figures = {"metrics": {"acc": 0.5, "loss": 0.198}, "metrics_of_epoch": {"loss": 0.2214}}
    now = replace(now, log=replace(now.log, **figures))
    timeline = Timeline()
    timeline.add(now, 0)
    text = "\n".join(summary(now, timeline))
    assert "loss                 0.2214 in the last epoch, 0.198 in the last 32 rounds" in text
    assert "acc                  0.5 in the last 32 rounds" in text
    shown = io.StringIO()
    Console(width=120, file=shown).print(table(now, timeline))
    assert "acc 0.5  loss 0.198 (last 32 rounds)" in shown.getvalue()
    assert line(now, timeline).endswith(" | acc 0.5  loss 0.198 (last 32 rounds)")


def test_the_time_left_follows_the_current_speed() -> None:
    timeline = Timeline()
    timeline.add(status(0, change(FIRST, "start")), 0)
    assert timeline.left_s is None
    timeline.add(status(20, change(FIRST, "start")), 2 * S)
    assert timeline.left_s == pytest.approx(8.0)


def test_events_are_reported_once_and_changes_outlive_a_coordinator() -> None:
    timeline = Timeline()
    news = timeline.add(status(5, change(FIRST, "start"), happened=2), S)
    assert [h.message for h in news] == ["a1", "a2"]
    news = timeline.add(status(5, change(FIRST, "start"), happened=3), 2 * S)
    assert [h.message for h in news] == ["a3"]
    news = timeline.add(status(6, change(SECOND, "again"), who="b", happened=1), 3 * S)
    assert [h.message for h in news] == ["b1"]
    assert [c.why for c in timeline.changes.values()] == ["start", "again"]


# ---- summary and table ------------------------------------------------------------------------


def test_the_summary_shows_rounds_speed_samples_and_changes() -> None:
    timeline = Timeline()
    timeline.add(status(0, change(FIRST, "rank 1 died")), 0)
    last = status(40, change(FIRST, "rank 1 died"))
    timeline.add(last, 4 * S)
    text = "\n".join(summary(last, timeline))
    for part in (
        "rounds               40 in 4.0 s",
        "rounds/s             10.0",
        "applied gradients/s  20.0",
        "quorum 40",
        "2,560, of these 5 late",
        "stale 3",
        "2 with each sample applied exactly once",
        "rank 0 75%",
        "1.1   round 7      rank 1 died (agreed after 0.10 s; all started after 0.25 s;",
        "; longest gap between rounds 0.50 s)",
    ):
        assert part in text, text
    assert "all 0" not in text
    assert "WARNING" not in text
    log = replace(last.log, samples_dropped={"skipped": 4096})
    text = "\n".join(summary(replace(last, log=log), timeline))
    assert "WARNING              4,096 samples were taken from the loader and no step" in text


def test_shadow_and_stragglers_are_shown_in_table_line_and_summary() -> None:
    slow = StragglerStatus(MemberId(0, 0, 0), 312, 0.0, "Tolerate")
    gone = StragglerStatus(MemberId(1, 0, 0), 180, 0.0, "RestartInPlace")
    shadow = ShadowStatus(20, 40, 12.0, {"Quorum": 9.0, "Solo": 11.5}, {"Quorum": 7, "Solo": 20})
    at_first = replace(status(5, change(FIRST, "start")), stragglers=(gone,))
    log = replace(at_first.log, shadow=shadow)
    now = replace(status(20, change(FIRST, "start")), stragglers=(slow,), log=log)
    timeline = Timeline()
    timeline.add(at_first, 0)
    timeline.add(now, 2 * S)
    text = "\n".join(summary(now, timeline))
    for part in (
        "shadow: 20 rounds ran as Full, the ranks waited 12.0 s in them",
        "Quorum     9.0 s of waiting saved (75%), 7 of 40 gradients late",
        "Solo       11.5 s of waiting saved (96%), 20 of 40 gradients late",
        "rank 0 takes 312 % of the median step since",
        "tolerated, nothing is replaced (straggler.respond: Tolerate); until the end",
        "rank 1 takes 180 %",
        "its process was started again (straggler.respond: RestartInPlace); not any more",
    ):
        assert part in text, text
    output = io.StringIO()
    console = Console(width=160, file=output)
    console.print(table(now, timeline))
    shown = output.getvalue()
    assert "rank 0 takes 312 % of the median step" in shown
    assert "Quorum: 9.0 s of waiting saved" in shown
    assert "share=75% SLOW" in line(now, timeline)


def test_one_slow_replica_is_replaced_per_cooldown_and_none_at_the_end() -> None:
    spec = StragglerSettings(50, 1.5, (StragglerResponse.REPLACE,), 10 * S)
    replacer = Replacer(spec)
    one, two = (StragglerStatus(MemberId(n, 0, 0), 300, 0.0, "Replace") for n in (1, 2))
    tolerated = StragglerStatus(MemberId(3, 0, 0), 900, 0.0, "Tolerate")
    now = replace(status(5), stragglers=(tolerated, one, two))
    assert replacer.choose(replace(now, stopping=True), 0) is None
    assert replacer.choose(now, 0) == one
    assert replacer.choose(now, 9 * S) is None
    assert replacer.choose(now, 10 * S) == two
    assert replacer.choose(now, 99 * S) is None, "each pod once"


def test_the_summary_is_empty_without_a_round() -> None:
    assert summary(None, Timeline()) == []
    assert summary(status(0), Timeline()) == []


def test_the_verdict_is_complete_failed_or_stopped_by_the_user() -> None:
    failed, complete = Outcome(False, "ScriptFailed", "x"), Outcome(True, "Complete", "x")
    assert verdict("j", failed, interrupted=False) == "job j: Failed (ScriptFailed)"
    assert verdict("j", complete, interrupted=False) == "job j: Complete"
    assert verdict("j", complete, interrupted=True) == "job j: stopped by the user"


def test_table_and_line_show_the_same_figures() -> None:
    timeline = Timeline()
    now = status(20, change(FIRST, "start"))
    timeline.add(status(0, change(FIRST, "start")), 0)
    timeline.add(now, 2 * S)
    output = io.StringIO()
    console = Console(width=120, file=output)
    console.print(table(now, timeline))
    shown = output.getvalue()
    for part in (
        "round 20",
        "10.0/s",
        "mode Quorum",
        "generation 1.1",
        "active 1/2",
        "20%",
        "ETA 0:08",
    ):
        assert part in shown, shown
        assert part in line(now, timeline)
    assert "0:active step=20.5 ms lag=1.0 ms share=75%" in line(now, timeline)
    assert "41" in shown
    assert "exit code 1" in shown
    assert "Traceback" not in shown, "one line per rank"


def test_the_place_of_a_rank_follows_from_slot_and_process() -> None:
    assert place_of(MemberId(2, 1, 3), procs=4) == 9
