"""Figures of `pl.log` as TensorBoard events, written by the job in a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from testing.processes.runs import ForkedRun

pytestmark = pytest.mark.processes

STEPS = 120
SCRIPT = f"""\
import time
import torch
import paceline as pl

torch.set_num_threads(1)
pl.init()
model = torch.nn.Linear(2, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
for step in pl.steps({STEPS}):
    model(torch.ones(1, 2)).sum().backward()
    pl.log("rank", 10.0 * (1 + pl.rank()), weight=1 + pl.rank())
    optimizer.step()
    time.sleep(0.01)
pl.finish()
"""


def events(folder: Path) -> dict[int, float]:
    """Return the value of the figure by round, from all event files in their order."""
    by_round: dict[int, float] = {}
    for file in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0})
        reader.Reload()
        for event in reader.Scalars("rank"):
            assert event.step not in by_round, "two ranks wrote one round"
            by_round[event.step] = event.value
    return by_round


def test_the_job_writes_the_means_over_all_ranks_although_the_writer_dies(tmp_path: Path) -> None:
    """Rank 0 writes until it is killed; then the lowest rank that is left goes on."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--set=spec.logging.tensorBoard=events", "--run-dir=run"]
    words += ["--inject=kill:rank=0,at=round:40"]
    code, output = ForkedRun(tmp_path, "[python, train.py]", *words).wait()
    assert code == 0, output
    by_round = events(tmp_path / "events")
    means = {round(value, 4) for value in by_round.values()}
    assert 16.6667 in means, "(10 x 1 + 20 x 2) / 3, of both ranks"
    assert means <= {16.6667, 10.0, 20.0}, "or of one, while the other is away"
    assert len(list((tmp_path / "events").iterdir())) >= 2
    # A killed writer takes the seconds with it that were not in its file yet.
    assert STEPS - 1 in by_round, "the last round"
    assert len(by_round) >= STEPS // 2


def test_a_folder_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "events").write_text("a file")
    words = ["--set=spec.logging.tensorBoard=events", "--run-dir=run"]
    code, output = ForkedRun(tmp_path, "[python, train.py]", *words).wait()
    assert code == 0, output
    assert "spec.logging.tensorBoard: " in output
    assert f"the figures of {STEPS} rounds are missing" in output
