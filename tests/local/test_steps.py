"""A script that draws its own batches, like nanoGPT, in real runs: the job counts its steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from testing.processes.runs import ForkedRun, joined
from tests.layers import exhaustive

pytestmark = pytest.mark.processes

STEPS = 300
SCRIPT = """\
import time
import torch
import paceline as pl

torch.manual_seed(0)
torch.set_num_threads(1)
pl.init()
model = torch.nn.Linear(8, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
made = 0
{loop}
    x = torch.randn(4, 8)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    made += 1
    while made > 60 and pl.size() < 3:
        time.sleep(0.05)  # the job shall not end before all are there
pl.finish()
print("THROUGH", made, pl.progress().step, pl.is_publisher(), flush=True)
"""
WAITS = "while made > 60 and pl.size() < 3:"
COUNTED = f"for step in pl.steps({STEPS}):\n    made == 0 and print('FIRST', step, flush=True)"
UNCOUNTED = "for step in range(90):"
KILL_AND_JOIN = ("--inject=kill:rank=1,at=round:50", "--inject=join:at=round:50")


def run(
    folder: Path, loop: str, mode: str, *, pipeline: int = 0
) -> tuple[int, str, dict[str, Any]]:
    (folder / "train.py").write_text(SCRIPT.format(loop=loop))
    words = [f"--set=spec.collective.mode={mode}", "--run-dir=run", *KILL_AND_JOIN]
    words.append(f"--set=spec.collective.pipeline={pipeline}")
    code, output = ForkedRun(folder, "[python, train.py]", *words).wait()
    status: dict[str, Any] = json.loads((folder / "run" / "status.json").read_text())
    return code, output, status


@pytest.mark.parametrize(
    ("mode", "pipeline"),
    [exhaustive("Full", 1), ("Solo", 0), exhaustive("Full", 0), exhaustive("Solo", 1)],
)
def test_a_job_makes_its_number_of_steps_despite_a_kill_and_a_join(
    tmp_path: Path, mode: str, pipeline: int
) -> None:
    code, output, status = run(tmp_path, COUNTED, mode, pipeline=pipeline)
    assert code == 0, output
    assert joined(output) == {"1.0#1", "2.0#0"}
    through = re.findall(r"THROUGH (\d+) (\d+) (\w+)", output)
    assert len(through) == 3, output
    [end] = {int(step) for _, step, _ in through}
    assert end == STEPS or (mode == "Solo" and end > STEPS)
    assert [publishes for *_, publishes in through].count("True") == 1
    assert status["log"]["progress"] == 1.0
    if mode == "Full":
        assert status["log"]["updates"] == STEPS
        # Two ranks start at step 0; the successor of the killed one and the joiner start later.
        first = sorted(int(step) for step in re.findall(r"FIRST (\d+)", output))
        assert first[:2] == [0, 0]
        assert all(50 <= step < STEPS for step in first[2:])
        assert len(first) <= 4  # a joiner may still be receiving the state at the last step


@pytest.mark.exhaustive
def test_a_loop_without_pl_steps_starts_over_and_is_reported(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, UNCOUNTED, "Full")
    assert code == 0, output
    assert "ScriptStartsOver: the script feeds itself and says no number of steps" in output
    assert "pl.steps(N)" in output
    assert "this rank begins its loop at the first step, and the job has made" in output


OWN_COUNT = """\
while True:
    if made >= 80 or optimizer.stopped:
        pl.stop()
        print("ENDS", flush=True)
        break
    time.sleep(0.02 * pl.rank())"""


@pytest.mark.parametrize("mode", ["Full", "Solo"])
def test_a_script_that_counts_its_own_steps_ends_the_job_with_pl_stop(
    tmp_path: Path, mode: str
) -> None:
    """End it like nanoGPT, by `if iter_num > max_iters: break`.

    In Solo, the slow rank is far behind then.
    """
    (tmp_path / "train.py").write_text(SCRIPT.format(loop=OWN_COUNT).replace(WAITS, "while False:"))
    words = (f"--set=spec.collective.mode={mode}", "--run-dir=run")
    code, output = ForkedRun(tmp_path, "[python, train.py]", *words).wait()
    assert code == 0, output
    assert output.count("ENDS") == 2
    through = re.findall(r"THROUGH (\d+) (\d+) (\w+)", output)
    assert len({step for _, step, _ in through}) == 1
    assert [publishes for *_, publishes in through].count("True") == 1
    assert json.loads((tmp_path / "run" / "status.json").read_text())["outcome"]["complete"]


def test_pl_stop_on_one_rank_ends_the_scripts_of_the_others(tmp_path: Path) -> None:
    """Loop forever on the other rank: its script ends there, and nothing fails."""
    loop = "while True:\n    made == 20 and pl.rank() == 0 and (pl.stop(), exit())"
    (tmp_path / "train.py").write_text(SCRIPT.format(loop=loop).replace(WAITS, "while False:"))
    code, output = ForkedRun(tmp_path, "[python, train.py]", "--run-dir=run").wait()
    assert code == 0, output
    assert "another rank has ended the job with pl.stop()" in output
    assert "THROUGH" not in output
