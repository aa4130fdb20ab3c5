"""A DDP script in a real job is as exact and as elastic as any other (D14)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from testing.processes.runs import forked_paceline, joined
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: job}
spec:
  replicas: 3
  collective: {backend: gloo, mode: Full}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, "$(SCRIPT)"]}]
"""
COMMON = """\
import hashlib, os, time
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
EPOCHS, HIDDEN = int(os.environ["EPOCHS"]), int(os.environ["HIDDEN"])
net = torch.nn.Sequential(torch.nn.Linear(8, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1))
if HIDDEN > 1000:
    net[0].weight.register_hook(lambda _: time.sleep(0.005))  # the last of backward()
x = torch.randn(600, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

def tell():
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    print("WEIGHTS", hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest(), flush=True)
"""
DDP = (
    COMMON
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
import paceline as pl
from paceline.errors import UnsupportedError

dist.init_process_group("gloo")
model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=4, sampler=sampler)
loader = pl.ddp(model, optimizer, loader, epochs=EPOCHS)
steps, wanted = 0, int(os.environ.get("WAIT_FOR", "0"))
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        steps += 1
        if steps > 60 and pl.size() < wanted:
            time.sleep(0.25)  # the job shall not end before all are there
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
tell()
try:
    dist.all_reduce(torch.ones(1))
except UnsupportedError as error:
    print("REFUSED", error.message, flush=True)
dist.destroy_process_group()
"""
)
PLAIN = (
    COMMON
    + """
import paceline as pl

pl.init()
optimizer = pl.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01), net)
loader = pl.DataLoader(data, 4, seed=5)
for _ in loader.epochs(EPOCHS):
    for x, y in loader:
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
tell()
"""
)
STRANGER = (
    COMMON
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(net)
model(x).mean().backward()
print("RANK", dist.get_rank(), "OF", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""
)


def run(folder: Path, script: str, *words: str, **env: str) -> tuple[int, str]:
    (folder / "job.yaml").write_text(JOB)
    (folder / "script.py").write_text(script)
    settings = {"SCRIPT": "script.py", "EPOCHS": "2", "HIDDEN": "16"} | env
    return forked_paceline(folder, "run", "job.yaml", *words, **settings)


def test_full_mode_with_ddp_gives_the_bits_of_a_plain_model(tmp_path: Path) -> None:
    """Stream its rounds, unlike those of the plain model."""
    segments = "--set=spec.collective.segmentBytes=65536"
    code, said = run(tmp_path, DDP, segments, "--run-dir=run", HIDDEN="9000")
    assert code == 0, said
    hashes = re.findall(r"WEIGHTS (\w+)", said)
    assert len(hashes) == 3
    assert said.count("REFUSED torch.distributed.all_reduce() in a job") == 3
    log = json.loads((tmp_path / "run" / "status.json").read_text())["log"]
    assert log["streamed"] > sum(log["rounds"].values()) / 2, log
    code, plain = run(
        tmp_path, PLAIN, segments, "--set=spec.collective.overlap=Never", HIDDEN="9000"
    )
    assert code == 0, plain
    assert {*hashes, *re.findall(r"WEIGHTS (\w+)", plain)} == {hashes[0]}


@pytest.mark.exhaustive
def test_a_pipeline_with_ddp_gives_the_bits_of_a_plain_model(tmp_path: Path) -> None:
    words = ("--set=spec.collective.segmentBytes=65536", "--set=spec.collective.pipeline=1")
    code, said = run(tmp_path, DDP, *words, "--run-dir=run", HIDDEN="9000")
    assert code == 0, said
    log = json.loads((tmp_path / "run" / "status.json").read_text())["log"]
    assert not log["streamed"], "a whole reduction is hidden, not its segments"
    assert "epochs               2 with each sample applied exactly once" in said
    code, plain = run(tmp_path, PLAIN, *words, HIDDEN="9000")
    assert code == 0, plain
    hashes = re.findall(r"WEIGHTS (\w+)", said + plain)
    assert len(hashes) == 6
    assert len(set(hashes)) == 1


@pytest.mark.parametrize("pipeline", exhaustive_except([1], [0, 1]))
def test_a_ddp_job_survives_a_kill_and_a_join(tmp_path: Path, pipeline: int) -> None:
    code, said = run(
        tmp_path,
        DDP,
        f"--set=spec.collective.pipeline={pipeline}",
        *("--set", "spec.collective.mode=Quorum", "--set", "spec.collective.quorum=2"),
        *("--set", "spec.collective.maxAge=0"),  # no gradient is dropped, however late
        *("--inject", "kill:rank=1,at=round:50", "--inject", "join:at=round:50"),
        EPOCHS="10",
        WAIT_FOR="4",
    )
    assert code == 0, said
    hashes = re.findall(r"WEIGHTS (\w+)", said)
    assert len(hashes) == 4, said
    assert len(set(hashes)) == 1
    assert joined(said) == {"1.0#1", "3.0#0"}
    assert "epochs               10 with each sample applied exactly once" in said
    assert "samples dropped      0" in said


def test_a_ddp_script_without_pl_ddp_fails_with_a_hint(tmp_path: Path) -> None:
    code, said = run(tmp_path, STRANGER)
    assert code == 1
    assert "RANK 0 OF 1" in said
    assert "ScriptTookNoPart" in said
    assert "pl.ddp()" in said
