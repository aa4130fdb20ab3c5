"""A real job of an unchanged script that is scaled down and up while it trains (S1, S3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.processes.runs import ForkedRun, forked_paceline

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
going = torch.ones(1)
while going.item():
    for (x,) in DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2):
        optimizer.zero_grad()
        model(x * (rank + 1)).mean().backward()
        optimizer.step()
    going.fill_(not os.path.exists("stop"))
    dist.broadcast(going, 0)
    time.sleep(0.05)
with open(f"of-{rank}", "w") as file:
    file.write(f"{ranks} ranks, {model.module.weight.tolist()}")
"""


WORDS = ("--replicas", "3", "--mode", "Full")


@pytest.mark.exhaustive
def test_a_script_trains_on_while_its_job_is_scaled_down_and_up(tmp_path: Path) -> None:
    """Calls do not wait for a rank that was scaled away, and its successor catches up."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with ForkedRun(tmp_path, "[paceline, launch, train.py]", *WORDS) as run:
        run.until("3 ranks, 3 active")
        for replicas, text in (("2", "2 ranks, 2 active"), ("3", "joins")):
            words = ("scale", "runs/job-1", "--replicas", replicas)
            code, output = forked_paceline(tmp_path, *words)
            assert code == 0, output
            run.until(text)
        (tmp_path / "stop").touch()
        code, output = run.wait()
    assert code == 0, output
    assert "going on without" not in output, output
    ended = {path.read_text() for path in tmp_path.glob("of-*")}
    assert len(ended) == 1, ended
    assert ended.pop().startswith("3 ranks, ")
