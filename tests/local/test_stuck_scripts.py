"""A script that does not return to step() is reported, and ended after its deadline."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.processes.runs import ForkedRun, forked_paceline
from tests.local.stuck_script import LINE_INSIDE, LOOP, READ, stuck_script

pytestmark = pytest.mark.processes

DEADLINE = "--set=spec.stepDeadlineSeconds=4"


def run(folder: Path, where: str, how: str, *words: str) -> tuple[int, str]:
    (folder / "train.py").write_text(stuck_script(how, inside=where))
    call = ForkedRun(folder, "[python, train.py]", DEADLINE, "--run-dir", "run", *words)
    return call.wait()


@pytest.mark.parametrize(
    ("how", "mode"),
    [(LOOP, "Full"), pytest.param(READ, "Solo", marks=pytest.mark.exhaustive)],
    ids=["loop", "read"],
)
def test_a_stuck_rank_is_ended_and_others_train_its_batch(
    tmp_path: Path, how: str, mode: str
) -> None:
    """Hang in a batch; the others used to wait for it forever without a message."""
    where = "RANK == 1 and ATTEMPT == 0 and epoch == 1"
    code, output = run(tmp_path, where, how, f"--set=spec.collective.mode={mode}")
    assert code == 0, output
    assert "job job: Complete" in output
    [named] = [line for line in output.splitlines() if "ScriptStuck: the script of" in line]
    assert "the script of rank 1.0#0 on " in named
    assert (
        f"train.py, line {LINE_INSIDE}); it is ended after 4 s (spec.stepDeadlineSeconds)" in named
    )
    bound = "step() was not called for 4 s, spec.stepDeadlineSeconds"
    stuck = f"ScriptStuck: {bound} (train.py, line {LINE_INSIDE})"
    [died] = [line for line in output.splitlines() if "RankDied: " in line]
    assert f"rank 1.0#0: {stuck}" in died
    assert "SCRIPT FAILED" in output
    _, explained = forked_paceline(tmp_path, "explain", "run")
    assert f"the script failed on the way: {stuck} on rank 1.0#0" in explained


def test_a_script_that_is_stuck_on_all_ranks_fails_the_job_with_its_line(tmp_path: Path) -> None:
    """Hang on all ranks; such a run used to go on forever."""
    code, output = run(tmp_path, "epoch == 1", READ, "--quiet")
    assert code == 1, output
    assert "Failed (ScriptFailed)" in output
    last = next(line for line in reversed(output.splitlines()) if line.startswith("error: "))
    assert "ScriptStuck: step() was not called for 4 s" in last
    assert f"train.py, line {LINE_INSIDE}) on ranks " in last
