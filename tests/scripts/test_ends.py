"""A job is complete only when the script of slot 0 has ended, whoever is killed before (S14)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testing.scripts.job import run_paceline

pytestmark = pytest.mark.processes

SAVES_AT_ITS_END = '''
"""Trains, averages a figure, and saves at its end; slot 0 is killed once where it is told to."""
import os, signal, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCHES = 3, 4
dies_at, out = sys.argv[1], sys.argv[3]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
data = TensorDataset(torch.randn(2 * BATCHES * ranks, 4), torch.randn(2 * BATCHES * ranks, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def may_die(where):
    mark = os.path.join(out, "killed")
    if rank == 0 and where == dies_at and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for batch, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if epoch == EPOCHS - 1 and batch == 1:
            may_die("in the last pass")
    total = loss.detach().clone()
    dist.all_reduce(total)
may_die("before it saves")
state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
if rank == 0:
    torch.save(state, os.path.join(out, "model.pt"))
torch.save(state, os.path.join(out, f"of-{rank}.pt"))
'''


@pytest.mark.parametrize("where", ["in the last pass", "before it saves"])
def test_a_job_ends_when_the_replacement_of_slot_0_has_saved_the_last_state(
    where: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAVES_AT_ITS_END)
    job = run_paceline(script, 3, [where], tmp_path / "job")
    assert not any(job.last.codes), job.story
    assert job.attempts[0] == 2, job.story
    saved, other = (
        torch.load(tmp_path / "job" / name, weights_only=True) for name in ("model.pt", "of-1.pt")
    )
    assert torch.equal(saved["model"]["weight"], other["model"]["weight"]), job.story
    momentum = [each["optimizer"]["state"][0]["momentum_buffer"] for each in (saved, other)]
    assert torch.equal(*momentum), job.story
