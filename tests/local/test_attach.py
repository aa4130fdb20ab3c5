"""A script for torchrun with the command `python SCRIPT` attaches itself or fails at once (S16)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.processes.runs import forked_paceline

pytestmark = pytest.mark.processes

JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: job}
spec:
  replicas: 2
  collective: {backend: gloo, mode: Full}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, script.py, --rate, "0.1"]}]
"""
SCRIPT = """\
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

print("begins", flush=True)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
rank, size = dist.get_rank(), dist.get_world_size()
print("RANK", rank, "OF", size, sys.argv[1:], model.module.weight.grad.tolist(), flush=True)
"""


def run(folder: Path, script: str, *words: str) -> tuple[int, str]:
    (folder / "job.yaml").write_text(JOB)
    (folder / "script.py").write_text(script)
    return forked_paceline(folder, "run", "job.yaml", *words)


def test_a_script_that_attaches_has_the_ranks_of_torchrun(tmp_path: Path) -> None:
    code, output = run(tmp_path, "import paceline as pl\npl.attach()\n" + SCRIPT)
    assert code == 0, output
    for rank in (0, 1):
        assert f"RANK {rank} OF 2 ['--rate', '0.1'] [[0.5, 0.5]]" in output, output
    assert len(re.findall("begins", output)) == 2, "nothing before pl.attach() runs twice"


def test_a_script_for_torchrun_that_nobody_launches_fails_at_once(tmp_path: Path) -> None:
    code, output = run(tmp_path, SCRIPT)
    assert code != 0
    error = next(line for line in output.splitlines() if line.startswith("error: "))
    assert "paceline launch SCRIPT" in error, output
    assert "pl.attach()" in error
    assert "RANK 0" not in output


def test_a_script_that_attaches_is_refused_in_mode_shadow(tmp_path: Path) -> None:
    words = ("--set", "spec.collective.mode=Shadow")
    code, output = run(tmp_path, "import paceline as pl\npl.attach()\n" + SCRIPT, *words)
    assert code != 0
    assert "error: rank" in output, output
    assert "spec.collective.mode is Shadow" in output, output
    assert "pl.DistributedOptimizer" in output, output
    assert "RANK" not in output


def test_attaching_after_init_names_both_calls(tmp_path: Path) -> None:
    code, output = run(tmp_path, "import paceline as pl\npl.init()\npl.attach()\n")
    assert code != 0
    assert "pl.attach() after pl.init()" in output, output
