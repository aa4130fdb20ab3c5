"""A rehearsal of 64 ranks, small enough to run every day.

Only what holds at any speed is checked: the ledger of all ranks. `make rehearse` prints the
measurements.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 240

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.processes,
    pytest.mark.timeout(LIMIT_S + 30),
]


def test_a_rehearsal_of_64_ranks_with_faults_accounts_for_every_sample() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "rehearsal", "--ranks", "64"),
            *("--between", "2", "--quiet", "1", "--limit", "120"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert "on all 64" in done.stdout
    for what in ("death", "drain of 1 x 8", "join of 1 x 8", "new coordinator"):
        assert f"again: {what} |" in done.stdout, f"no {what}:\n{done.stdout[-6000:]}"
