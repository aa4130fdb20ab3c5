"""A rank of a script is killed: a replacement joins, and all ranks end with equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.scripts.table import Elastic, Row, rows
from testing.scripts.trials import try_kill
from tests.layers import exhaustive_unless
from tests.scripts.rows import skip_if_lacking

pytestmark = pytest.mark.processes

ELASTIC = [row for row in rows() if row.elastic is Elastic.YES and "elastic" not in row.once]
IN_SHORT = ("imagenet.py", "evaluate_in_pass.py")


@pytest.mark.parametrize(
    "row",
    exhaustive_unless(lambda row: row.script in IN_SHORT, ELASTIC),
    ids=[row.name for row in ELASTIC],
)
def test_a_killed_rank_is_replaced_and_all_ranks_end_equal(row: Row, tmp_path: Path) -> None:
    skip_if_lacking(row)
    try_kill(row, tmp_path / "job")
