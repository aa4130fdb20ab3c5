"""Elasticity settings allowedSizes and stabilizationSeconds in real runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from testing.processes.even_script import even_steps
from testing.processes.runs import ForkedRun

pytestmark = pytest.mark.processes


def finished(folder: Path, *options: str) -> dict[str, Any]:
    """Return the last status of a run with three replicas."""
    (folder / "train.py").write_text(even_steps(2400, together=3))
    words = ("--set=spec.replicas=3", "--run-dir=run", *options)
    code, output = ForkedRun(folder, "[python, train.py]", *words).wait()
    assert code == 0, output
    status: dict[str, Any] = json.loads((folder / "run" / "status.json").read_text())
    assert status["log"]["epochs_exact"] == 1, "each sample counts once"
    return status


def test_a_job_shrinks_to_its_survivors_and_grows_to_an_allowed_size(tmp_path: Path) -> None:
    """Kill two of three ranks: the first one to return would make two, which is not allowed."""
    status = finished(
        tmp_path,
        "--set=spec.elasticity.allowedSizes=[1, 3]",
        "--set=spec.elasticity.stabilizationSeconds=0",
        "--inject=kill:rank=1,at=round:20",
        "--inject=kill:rank=2,at=round:20",
    )
    sizes = [change["members"] for change in status["changes"]]
    assert (sizes[0], sizes[-1]) == (3, 3)
    grown = [new for old, new in pairwise(sizes) if new > old]
    assert grown == [3], sizes


@pytest.mark.exhaustive
def test_replicas_that_died_together_rejoin_together(tmp_path: Path) -> None:
    status = finished(
        tmp_path,
        "--set=spec.elasticity.stabilizationSeconds=60",
        "--inject=kill:rank=1,at=round:20",
        "--inject=kill:rank=2,at=round:20",
    )
    joined = [change for change in status["changes"] if change["reason"] == "Joined"]
    assert [change["members"] for change in joined] == [3]
