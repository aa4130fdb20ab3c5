"""Partial rounds in scripts: one random rank is late in each step (S17)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from testing.scripts.job import JobResult, run_paceline
from testing.scripts.table import Late, Row, rows
from testing.scripts.trials import Books, try_late
from tests.layers import exhaustive_unless

pytestmark = pytest.mark.processes

SCRIPT: Final = Path(__file__).parents[2] / "testing/scripts/late_script.py"
SAMPLES: Final = 480
"""Samples of one epoch of SCRIPT."""
BATCH: Final = 8
"""Samples of one of its batches."""
MODES: Final[dict[str, dict[str, Any]]] = {
    "Quorum": {"mode": "Quorum", "quorum": "75%"},
    "Majority": {"mode": "Majority"},
    "Solo": {"mode": "Solo"},
    "Deadline": {"mode": "Deadline", "deadline": "10ms", "quorum": 2},
}
QUORUM: Final = MODES["Quorum"]


def sums(job: JobResult, ranks: int) -> list[list[str]]:
    """Return the sums of the weights behind each step, by rank."""
    assert not any(job.last.codes), job.story
    return [(job.last.out / f"steps.{rank}").read_text().splitlines() for rank in range(ranks)]


def weights_of_samples(job: JobResult, rank: int) -> list[float]:
    """Return the weight with which each sample was applied, in its order; 0 if it was not."""
    counts = torch.load(job.last.out / f"counts.{rank}.pt", weights_only=True)
    return [-each for each in counts.tolist()]


@pytest.mark.parametrize(
    "mode", exhaustive_unless(lambda mode: mode == "Quorum", list(MODES)), ids=list(MODES)
)
def test_late_ranks_have_equal_weights_at_equal_steps(mode: str, tmp_path: Path) -> None:
    job = run_paceline(SCRIPT, 4, (), tmp_path / "job", late_s=0.02, collective=MODES[mode])
    first, *others = sums(job, 4)
    assert len(first) == 2 * SAMPLES // (4 * BATCH)
    assert all(other == first for other in others), job.story
    books = Books.of(job)
    applied, late, dropped = books.applied, books.late, books.dropped
    assert late > 0, job.story
    assert applied + dropped == 2 * SAMPLES, "taken = applied + dropped at the end"
    assert dropped <= 3 * BATCH, "at most one gradient of each late rank"
    for rank in range(4):
        weights = weights_of_samples(job, rank)
        assert weights.count(1 / 4) == applied, "each gradient once, with the weight of one rank"
        assert weights.count(0.0) == dropped


@pytest.mark.parametrize(
    "words",
    exhaustive_unless(lambda words: not words, [(), ("--clip",)]),
    ids=["momentum", "clipped AdamW"],
)
def test_a_killed_rank_is_replaced_while_others_are_late(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    kill = "kill:rank=1,at=round:6"
    job = run_paceline(
        *(SCRIPT, 3, (*words, "--epochs", "8"), tmp_path / "job", "--inject", kill),
        collective={"mode": "Quorum", "quorum": 2},
    )
    assert f"injected {kill}" in job.report, "the job was over before the kill"
    assert job.attempts[1] > 1, job.story
    first, replaced, other = sums(job, 3)
    assert first == other
    assert len(first) == 8 * SAMPLES // (3 * BATCH)
    assert replaced[-1] == first[-1], job.story
    books = Books.of(job)
    for rank in range(3):
        weights = weights_of_samples(job, rank)
        assert sum(weight > 0 for weight in weights) == books.applied
        assert all(min(abs(x - w) for w in (0, 1 / 2, 1 / 3)) < 1e-12 for x in weights), weights
    assert books.dropped <= 3 * BATCH, "at most one gradient of each late rank"
    lost = 8 * SAMPLES - books.applied - books.dropped - books.absent
    assert 0 <= lost <= BATCH, "what the killed rank had late is lost, and in no book"


def final_loss(job: JobResult) -> float:
    """Return the loss that rank 0 of SCRIPT prints at its end, once all weights are equal."""
    first, *others = sums(job, 4)
    assert all(other == first for other in others), job.story
    match = re.search(r"^loss (\S+)$", job.last.ranks[0].stdout, re.M)
    assert match is not None, job.story
    return float(match.group(1))


@pytest.mark.exhaustive  # it tells what late gradients cost, and no promise of `make test`
@pytest.mark.parametrize("words", [(), ("--clip",)], ids=["momentum", "clipped AdamW"])
def test_late_gradients_less_than_double_the_final_loss(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    six = (*words, "--epochs", "6")
    at_once = (*six, "--work-ms", "0", "--late-ms", "0")
    full = final_loss(run_paceline(SCRIPT, 4, at_once, tmp_path / "full"))
    job = run_paceline(SCRIPT, 4, six, tmp_path / "quorum", late_s=0.02, collective=QUORUM)
    books = Books.of(job)
    assert books.late > books.applied / 20, "nobody was late: this run tells nothing"
    # Three seeds had 1.0 to 1.4 times the loss of Full, of which 0.01 is noise.
    assert full < 2 * 0.01, job.story
    assert final_loss(job) < 2 * full, job.story


TRIED = [row for row in rows() if row.late is not Late.UNTRIED and "late" not in row.once]
SHORT: Final = ("horovod_style.py",)


@pytest.mark.parametrize(
    "row",
    exhaustive_unless(lambda row: row.script in SHORT, TRIED),
    ids=[row.name for row in TRIED],
)
def test_a_script_of_the_table_keeps_its_books_with_late_ranks_and_a_kill(
    row: Row, tmp_path: Path
) -> None:
    books = try_late(row, tmp_path / "job")
    assert (books.late > 0) == (row.late is Late.GAINS), books
