"""The job of docs/get-started.md, at a small size: it ends, and every sample counted once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
PACELINE = Path(sys.executable).parent / "paceline"
LIMIT_S = 200.0


def test_the_first_job_of_the_documentation(tmp_path: Path) -> None:
    words = ["run", ROOT / "examples/first/job.yaml", "--run-dir", tmp_path / "run", "--quiet"]
    done = subprocess.run(
        [PACELINE, *words, "--inject", "slow:rank=2,ms=20"],
        env=os.environ | {"EPOCHS": "4", "XDG_RUNTIME_DIR": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    said = done.stdout
    assert done.returncode == 0, said
    assert said.count("after 4 epochs") == 1, f"one rank prints the accuracy:\n{said}"
    accuracy = float(said.partition("] accuracy ")[2].split()[0])
    assert accuracy > 0.8, "half of the points are inside: 0.5 would be a guess"
    assert "4 with each sample applied exactly once" in said
    assert (tmp_path / "run/status.json").exists()
