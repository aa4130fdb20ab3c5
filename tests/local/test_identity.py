"""Rank and size before training starts, in a real run in a folder whose name has a space."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.processes.runs import ForkedRun

pytestmark = pytest.mark.processes

SCRIPT = """\
import torch
import paceline as pl

torch.set_num_threads(1)
pl.init()
torch.manual_seed(0)
print("BEFORE", pl.rank(), pl.size(), pl.is_publisher(), flush=True)
model = torch.nn.Linear(4, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
for step in pl.steps(5):
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
print("AFTER", pl.rank(), pl.size(), pl.is_publisher(), flush=True)
"""


def test_exactly_one_rank_is_the_publisher_from_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    code, output = ForkedRun(folder, "[python, train.py]").wait()
    assert code == 0, output
    before = re.findall(r"BEFORE (\d) 2 (\w+)", output)
    assert sorted(before) == [("0", "True"), ("1", "False")]
    after = re.findall(r"AFTER (\d) 2 (\w+)", output)
    assert sorted(after) == [("0", "True"), ("1", "False")]
    assert "SeedsEqual: torch's seed is 0 on 0.0#0, 1.0#0" in output
