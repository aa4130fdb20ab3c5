"""Training scripts in the habits of public ones give the same result in each plain run.

A script that differs from run to run could not be compared with a run under Paceline.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.scripts.compare import compare
from testing.scripts.plain import Result, run_plain
from testing.scripts.table import Row, rows
from tests.layers import exhaustive_unless
from tests.scripts.rows import skip_if_lacking

pytestmark = pytest.mark.processes


ROWS = [(row, ranks) for row in rows() for ranks in row.ranks]


def is_short(case: tuple[Row, int]) -> bool:
    row, ranks = case
    return row.in_short and ranks == 2


def run_all(row: Row, ranks: int, out: Path) -> list[Result]:
    """Run all runs of a row on one folder."""
    results = []
    for args in row.runs:
        results.append(run_plain(row.path, ranks, args, out))
        assert not any(results[-1].codes), results[-1].story
    return results


@pytest.mark.parametrize(
    "case", exhaustive_unless(is_short, ROWS), ids=[f"{row.name}-{ranks}" for row, ranks in ROWS]
)
def test_two_plain_runs_of_a_script_are_equal(case: tuple[Row, int], tmp_path: Path) -> None:
    skip_if_lacking(case[0])
    one, other = (run_all(*case, tmp_path / name) for name in ("one", "other"))
    assert [line for both in zip(one, other, strict=True) for line in compare(*both)] == []
    assert all("weights" in rank.stdout.splitlines()[-1] for rank in one[-1].ranks)
    assert any((tmp_path / "one").iterdir()), "the script wrote no file"
