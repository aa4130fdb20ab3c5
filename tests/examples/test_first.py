"""The job of docs/get-started.md at a small size: it completes, and each sample counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.processes.runs import forked_paceline

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent


def test_the_first_job_of_the_documentation_completes(tmp_path: Path) -> None:
    job, folder = str(ROOT / "examples/first/job.yaml"), str(tmp_path / "run")
    words = ["run", job, "--run-dir", folder, "--quiet", "--inject", "slow:rank=2,ms=20"]
    code, output = forked_paceline(tmp_path, *words, EPOCHS="4", XDG_RUNTIME_DIR=str(tmp_path))
    assert code == 0, output
    assert output.count("after 4 epochs") == 1, f"one rank prints the accuracy:\n{output}"
    accuracy = float(output.partition("] accuracy ")[2].split()[0])
    assert accuracy > 0.8, "half of the points are inside: 0.5 would be a guess"
    assert "4 with each sample applied exactly once" in output
    assert (tmp_path / "run/status.json").exists()
