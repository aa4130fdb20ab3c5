"""Buckets of a script are summed while backward() runs, and a death in between loses nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from testing.scripts.compare import HASH
from testing.scripts.job import run_paceline
from testing.scripts.table import rows

pytestmark = pytest.mark.processes

KILL = "kill:rank=1,at=round:4"
BESIDE = re.compile(r"(\d+)% of the rounds ran beside backward\(\)")


def test_a_rank_that_dies_between_two_buckets_is_replaced(tmp_path: Path) -> None:
    """The pause comes before the last bucket, when the others are already summed."""
    script = next(row.path for row in rows() if row.script == "bucket_views.py")
    path = tmp_path / script.name
    path.write_text(script.read_text().replace("epoch in range(2)", "epoch in range(8)"))
    shutil.copy(script.with_name("figures.py"), tmp_path)
    job = run_paceline(path, 3, (), tmp_path / "job", "--inject", KILL, pause_s=0.3)
    assert not any(job.last.codes), job.story
    assert job.attempts[1] > 1, job.story
    last = [HASH.findall(rank.stdout)[-1] for rank in job.last.ranks]
    assert len(set(last)) == 1, job.story
    beside = BESIDE.search(job.report)
    assert beside is not None, job.story
    assert int(beside[1]) > 0, job.story
