"""Data that cannot be read twice: a replacement goes on with what comes next (S9)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from testing.scripts.job import run_paceline

pytestmark = pytest.mark.processes

LIVE = '''
"""Trains on a queue for each rank, which gives each of its samples once, to whoever reads it."""
import fcntl, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
import paceline as pl

STEPS, BATCH, CAPACITY = 24, 4, 1000
out = sys.argv[2]


class Queue(IterableDataset):
    rewinds = False

    def __init__(self, path):
        self.path = path

    def take(self):
        with open(self.path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            number = int(file.read() or 0)
            file.truncate(0)
            file.write(str(number + 1))
            file.flush()
        return number

    def __iter__(self):
        while True:
            yield self.take()


class Counter(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, samples):
        return self.counts[samples].sum()


dist.init_process_group("gloo")
rank = dist.get_rank()
loader = DataLoader(Queue(f"{out}/queue.{rank}"), batch_size=BATCH)
model = torch.nn.parallel.DistributedDataParallel(Counter(CAPACITY * dist.get_world_size()))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for samples in loader:
    if pl.step() >= STEPS:
        break
    optimizer.zero_grad()
    model(samples + CAPACITY * rank).backward()
    optimizer.step()
torch.save(model.module.counts.detach(), f"{out}/counts.{rank}.pt")
'''
BATCH, CAPACITY, KILLED_AT = 4, 1000, 14


@pytest.mark.exhaustive  # tests/train/script/test_passes.py has the promise without processes
def test_a_replacement_trains_on_all_that_it_takes_from_a_queue(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LIVE)
    kill = f"kill:rank=1,at=round:{KILLED_AT}"
    job = run_paceline(script, 3, (), tmp_path / "job", "--inject", kill, pause_s=0.3)
    assert not any(job.last.codes), job.story
    assert f"injected {kill}" in job.report, "the job was over before the kill"
    assert job.attempts[1] > 1, job.story
    counts = [torch.load(path, weights_only=True) for path in sorted(job.last.out.glob("*.pt"))]
    assert len(counts) == 3, job.story
    assert all(torch.equal(counts[0], other) for other in counts[1:]), job.story
    for rank in range(3):
        taken = int((job.last.out / f"queue.{rank}").read_text())
        applied = int((counts[0][CAPACITY * rank :][:taken] != 0).sum())
        # The batch behind the last step; of the killed rank also the one that died with it.
        assert taken - applied <= BATCH * (2 if rank == 1 else 1), job.story
    dropped = re.search(r"samples dropped .*\babsent ([\d,]+)", job.report)
    assert dropped is not None, job.story
    assert int(dropped.group(1).replace(",", "")) >= BATCH, "the batch that died is counted"
