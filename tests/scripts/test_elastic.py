"""A rank of a script is killed: a replacement joins, and all ranks end with equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.scripts.compare import HASH
from testing.scripts.job import run_paceline
from testing.scripts.table import Elastic, Row, rows
from tests.layers import exhaustive_unless
from tests.scripts.rows import skip_if_lacking

pytestmark = pytest.mark.processes

ELASTIC = [row for row in rows() if row.elastic is Elastic.YES]
RANKS = 3
PAUSE_S = 0.3
IN_SHORT = ("imagenet.py", "evaluate_in_pass.py")


@pytest.mark.parametrize(
    "row",
    exhaustive_unless(lambda row: row.script in IN_SHORT, ELASTIC),
    ids=[row.name for row in ELASTIC],
)
def test_a_killed_rank_is_replaced_and_all_ranks_end_equal(row: Row, tmp_path: Path) -> None:
    skip_if_lacking(row)
    kill = f"kill:rank=1,at=round:{row.kill_round}"
    job = run_paceline(
        row.path, RANKS, row.runs[0], tmp_path / "job", "--inject", kill, pause_s=PAUSE_S
    )
    assert not any(job.last.codes), job.story
    assert f"injected {kill}" in job.report, "the job was over before the kill"
    assert job.attempts[1] > 1, job.story
    last = [HASH.findall(rank.stdout)[-1] for rank in job.last.ranks]
    assert len(set(last)) == 1, job.story
