"""Histories of faults on real processes, over MPI, gloo, shared memory and two levels.

After each history the job is complete, weights and optimizer have the same bits on all ranks, the
weights themselves prove that each sample was applied exactly once per epoch (or the ledger says
what became of it), and nothing is left over. The set covers each pair of (fault, ranks, mode, data
channel, pacing, straggler) but those of a fault and a mode (`drawing` says why). `make test` runs
one history per fault, `make test-all` the whole set.

`make soak` runs the full matrix, then random variations of it: SOAK_SECONDS=3600 sets how long,
SOAK_SEED=n starts with history n. It does not stop at a failure but prints its seed.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from testing.processes.drawing import FAULTS, MATRIX, TOGETHER, covering, draw_history, soak_history
from testing.processes.history import ForkServer, History, check
from tests.layers import exhaustive_unless

SEED = 1
SMALL_RANKS = 3
HISTORIES = [draw_history(row, SEED) for row in covering(MATRIX, SEED) + covering(TOGETHER, SEED)]


def one_per_fault(histories: Sequence[History]) -> list[History]:
    """Return one history of each fault, with few ranks and with channels and modes in turn."""
    chosen: list[History] = []
    used: Counter[str] = Counter()
    for fault in FAULTS:
        least = min(
            (history for history in histories if history.fault == fault),
            key=lambda h: (h.ranks > SMALL_RANKS, used[h.channel] + used[h.mode], h.ranks, h.name),
        )
        used.update((least.channel, least.mode))
        chosen.append(least)
    return chosen


IN_MAKE_TEST = one_per_fault(HISTORIES)


@pytest.mark.processes
@pytest.mark.parametrize(
    "history",
    exhaustive_unless(lambda history: history in IN_MAKE_TEST, HISTORIES),
    ids=lambda h: h.name,
)
def test_a_job_completes_exactly_under_each_history_of_faults(
    fork_server: ForkServer, history: History, tmp_path: Path
) -> None:
    result = fork_server.run(history, tmp_path / "run")
    if "skip" in result:
        pytest.skip(result["skip"])
    check(history, result)


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(0)
def test_soak_histories_complete_exactly(fork_server: ForkServer, tmp_path: Path) -> None:
    """Run for SOAK_SECONDS, or one history without it."""
    until = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "0"))
    first = seed = int(os.environ.get("SOAK_SEED", "0"))
    failed: list[int] = []
    while True:
        history, folder = soak_history(seed), tmp_path / str(seed)
        sys.stdout.write(f"seed {seed}: {history.name}\n")
        sys.stdout.flush()
        try:
            result = fork_server.run(history, folder)
            if "skip" not in result:
                check(history, result)
            shutil.rmtree(folder)
        except AssertionError as error:
            failed.append(seed)
            sys.stdout.write(f"FAILED, its files are in {folder}: {error}\n")
            sys.stdout.write(f"again with: make soak SOAK_SECONDS=0 SOAK_SEED={seed}\n")
        seed += 1
        if time.monotonic() >= until:
            break
    sys.stdout.write(f"{seed - first} histories, seeds {first} to {seed - 1}\n")
    assert not failed, f"of {seed - first} histories these failed, by seed: {failed}"
