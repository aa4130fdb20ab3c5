"""`make gpu-check` without a GPU: it reports the missing GPU, and its parts run on the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 300

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 30)]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_machine_without_a_gpu_gets_a_one_line_message() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    done = run()
    assert done.returncode == 3
    assert done.stdout.count("\n") == 1
    assert "no GPU that torch can use" in done.stdout
    assert not done.stderr


def test_each_part_of_the_gpu_check_runs_on_the_host() -> None:
    done = run("--cpu", "3", "--smoke")
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    for title in (
        *("Order of queues", "Gradients through host memory", "Who adds what a peer has sent"),
        *("What asking a device costs", "Calls in a step that wait", "A group made anew"),
        *("One reduction", "Segments of 4 MiB", "A rank dies"),
        *("A compiled model", "A rank on a GPU is killed", "A step of a transformer"),
    ):
        assert f"## {title}" in done.stdout
    assert "BROKEN" not in done.stdout
