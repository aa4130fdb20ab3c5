"""Histories on real processes: kills, stops, drains, joins and scaling, over MPI and over gloo.

After each history the job is complete, weights and optimizer are the same bits on all ranks, the
weights themselves tell that each sample was applied exactly once per epoch, and nothing is left
over. The set covers each pair of (fault, ranks, mode, data channel, pacing, straggler).

SOAK_SECONDS=600 adds random histories for that long; a failure names its seed, and SOAK_SEED=<seed>
begins with it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from local.drawing import FACTORS, covering, draw_history, random_history
from local.history import History, Nursery, check

pytestmark = pytest.mark.processes

SEED = 1
HISTORIES = [draw_history(row, SEED) for row in covering(FACTORS, SEED)]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda h: h.name)
def test_history(nursery: Nursery, history: History, tmp_path: Path) -> None:
    check(history, nursery.run(history, tmp_path / "run"))


@pytest.mark.timeout(0)
def test_soak(nursery: Nursery, tmp_path: Path) -> None:
    """Random histories, as long as one likes; one without SOAK_SECONDS."""
    until = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "0"))
    seed = int(os.environ.get("SOAK_SEED", "1000"))
    while True:
        history = random_history(seed)
        sys.stdout.write(f"seed {seed}: {history.name}\n")
        try:
            check(history, nursery.run(history, tmp_path / str(seed)))
        except AssertionError as error:
            raise AssertionError(f"again with SOAK_SEED={seed}: {error}") from error
        seed += 1
        if time.monotonic() >= until:
            return
