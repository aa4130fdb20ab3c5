"""A script in a job gives what it gives under torchrun, or an error that names its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.scripts.compare import compare
from testing.scripts.job import run_paceline
from testing.scripts.plain import run_plain
from testing.scripts.table import Expectation, Row, rows
from tests.layers import exhaustive_unless
from tests.scripts.rows import skip_if_lacking

pytestmark = pytest.mark.processes


def cases(expect: Expectation) -> list[tuple[Row, int]]:
    """Return the rows of one expectation, each with its numbers of ranks."""
    return [(row, ranks) for row in rows() if row.expect is expect for ranks in row.ranks]


def is_short(case: tuple[Row, int]) -> bool:
    row, ranks = case
    return row.in_short and ranks == 2


def names(runs: list[tuple[Row, int]]) -> list[str]:
    return [f"{row.name}-{ranks}" for row, ranks in runs]


EQUAL, REFUSED = cases(Expectation.EQUAL), cases(Expectation.REFUSED)


@pytest.mark.parametrize("case", exhaustive_unless(is_short, EQUAL), ids=names(EQUAL))
def test_a_script_in_a_job_equals_a_plain_run(case: tuple[Row, int], tmp_path: Path) -> None:
    row, ranks = case
    skip_if_lacking(row)
    for args in row.runs:
        plain = run_plain(row.path, ranks, args, tmp_path / "plain")
        assert not any(plain.codes), plain.story
        job = run_paceline(row.path, ranks, args, tmp_path / "job")
        differences = compare(plain, job.last, tolerance=row.tolerance_at(ranks))
        assert differences == [], job.story
    assert all("weights" in rank.stdout.splitlines()[-1] for rank in plain.ranks)
    assert any((tmp_path / "plain").iterdir()), "the script wrote no file"


@pytest.mark.parametrize("case", exhaustive_unless(is_short, REFUSED), ids=names(REFUSED))
def test_a_refused_script_names_its_line_and_the_reason(
    case: tuple[Row, int], tmp_path: Path
) -> None:
    row, ranks = case
    plain = run_plain(row.path, ranks, row.runs[0], tmp_path / "plain")
    assert not any(plain.codes), plain.story
    job = run_paceline(row.path, ranks, row.runs[0], tmp_path / "job")
    assert any(job.last.codes), job.story
    error = re.search(
        rf"^error: .*{re.escape(row.reason)}.*{row.script}, line \d+", job.report, re.M
    )
    assert error is not None, job.story
    assert re.search("^hint: ", job.report, re.M), job.story
