"""Real jobs whose ranks disagree in their calls, or in their number of batches (S3)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.scripts.job import run_paceline
from tests.layers import exhaustive

pytestmark = pytest.mark.processes

TRAINS = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def epoch(batches):
    data = TensorDataset(torch.ones(2 * batches, 4))
    for (x,) in DataLoader(data, batch_size=2):
        optimizer.zero_grad()
        model(x * (rank + 1)).mean().backward()  # backward
        optimizer.step()
"""
CALLS_DIFFER = """
epoch(2)
if rank == 1:
    dist.barrier()  # here
else:
    dist.all_reduce(torch.ones(3))  # there
"""
UNEVEN = """
epoch(3 if rank == 1 else 2)
dist.all_reduce(torch.ones(3))  # there
"""


def line_of(script: str, mark: str) -> int:
    """Return the number of the line that ends with a comment."""
    return next(n for n, line in enumerate(script.split("\n"), 1) if line.endswith(f"# {mark}"))


@pytest.mark.parametrize(
    ("ends", "other"),
    [(CALLS_DIFFER, "here"), exhaustive(UNEVEN, "backward")],
    ids=["other calls", "more batches"],
)
def test_ranks_that_disagree_fail_the_job_with_both_lines(
    ends: str, other: str, tmp_path: Path
) -> None:
    """Under torchrun such a script hangs, or adds what does not belong together."""
    text = TRAINS + ends
    script = tmp_path / "train.py"
    script.write_text(text)
    job = run_paceline(script, 3, [], tmp_path / "job")
    assert all(job.last.codes), job.story
    assert "CallsDiffer" in job.report, job.report
    for mark in (other, "there"):
        assert re.search(rf"(line |:){line_of(text, mark)}\b", job.report), job.report
