"""The tables from which histories are drawn are complete, large enough and reproducible."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product

import pytest

from testing.processes.drawing import (
    CELL,
    CELLS,
    CHANNELS,
    FAULTS,
    MATRIX,
    ROUNDING,
    SIMULATED,
    TOGETHER,
    Factors,
    covering,
    draw_history,
    soak_history,
    soak_row,
)
from testing.processes.history import ROOT
from tests.local.test_histories import HISTORIES


@pytest.mark.parametrize("factors", [MATRIX, TOGETHER], ids=["matrix", "together"])
def test_each_pair_of_factor_values_occurs(factors: Factors) -> None:
    rows = covering(factors, 1)
    for i, j in combinations(range(len(factors)), 2):
        if (i, j) in SIMULATED:
            continue
        pairs = {(row[i], row[j]) for row in rows}
        assert pairs == set(product(factors[i], factors[j])), (i, j)


def test_the_set_of_histories_is_as_large_as_promised() -> None:
    assert len(HISTORIES) >= 60
    assert len({h.name for h in HISTORIES}) == len(HISTORIES)
    assert {h.fault for h in HISTORIES} == set(FAULTS)
    assert {h.ranks for h in HISTORIES} == {2, 3, 4, 5, 8}
    assert len({h.mode for h in HISTORIES}) == 8
    assert {h.channel for h in HISTORIES} == set(CHANNELS)
    wires = [(h.channel, h.collective.get("wire", "Float32")) for h in HISTORIES]
    assert min(wires.count((channel, "BFloat16")) for channel in ROUNDING) > 5


def test_soak_covers_the_full_matrix() -> None:
    cells = {soak_row(seed)[:CELL] for seed in range(len(CELLS))}
    assert cells == set(product(*MATRIX[:CELL])) | set(product(*TOGETHER[:CELL]))


DRAW = """
from testing.processes.drawing import soak_history
from tests.local.test_histories import HISTORIES
print(repr([*HISTORIES, soak_history(17)]))
"""


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_seed_determines_the_history() -> None:
    """Draw in another process, with another hash seed: several processes share the tests."""
    other = subprocess.run(
        [sys.executable, "-c", DRAW],
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == repr([*HISTORIES, soak_history(17)])
    row = soak_row(17)
    assert draw_history(row, 17) != draw_history(row, 18)
