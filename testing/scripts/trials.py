"""Kill a rank of a script of the table, or make random ranks late too, and judge the run.

Tests run the trials of some rows. The others are run by hand, and the table says so:

    python -m testing.scripts.trials killed|late ROW...

A ROW is named as in the ids of the tests, such as `nanogpt--max-iters8`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testing.scripts.compare import HASH
from testing.scripts.job import JobResult, run_paceline
from testing.scripts.table import Late, Row, rows
from testing.temporary import temporary_folder

KINDS: Final = ("killed", "late")
LATE_RANKS: Final = 4
KILLED_PAUSE_S: Final = 0.3
LATE_PAUSE_S: Final = 0.2


@dataclass(frozen=True)
class Books:
    """Samples that the report of a job counts."""

    applied: int
    late: int
    """Those of the applied ones that came one step late."""
    dropped: int
    """Those that a rank has taken and that are not applied."""
    absent: int
    """Those that no rank has taken, since the slot had none (S14)."""

    @classmethod
    def of(cls, job: JobResult) -> Books:
        """Read the books of a job that has ended."""
        match = re.search(r"samples applied +([\d,]+), of these ([\d,]+) late", job.report)
        dropped = re.search(r"samples dropped +(.*)", job.report)
        assert match is not None, job.story
        assert dropped is not None, job.story
        applied, late = (int(x.replace(",", "")) for x in match.groups())
        causes = re.findall(r"(\w+) (\d+(?:,\d{3})*)", dropped.group(1))
        given_up = {cause: int(count.replace(",", "")) for cause, count in causes}
        absent = given_up.pop("absent", 0)
        return cls(applied, late, sum(given_up.values()), absent)


def try_kill(row: Row, out: Path) -> None:
    """Kill rank 1 of a row's script in mode Full, and raise AssertionError if anything is wrong.

    Args:
        row: Row of the table.
        out: Folder for the files of the script.
    """
    kill = _kill(row)
    words = ("--inject", kill)
    job = run_paceline(row.path, row.kill_ranks, row.runs[0], out, *words, pause_s=KILLED_PAUSE_S)
    _ends_well(row, job, kill)


def try_late(row: Row, out: Path) -> Books:
    """Do the same in mode Quorum, while in each operation one random rank of four is late.

    Each gradient has to be in the books.

    Args:
        row: Row of the table.
        out: Folder for the files of the script.

    Returns:
        The books.
    """
    kill = _kill(row)
    job = run_paceline(
        *(row.path, LATE_RANKS, row.runs[0], out, "--inject", kill),
        pause_s=LATE_PAUSE_S,
        late_s=LATE_PAUSE_S,
        collective={"mode": "Quorum", "quorum": "75%"},
    )
    _ends_well(row, job, kill)
    books = Books.of(job)
    lost = sum(job.taken) - books.applied - books.dropped
    assert 0 <= lost <= 2 * max(job.taken, default=0), "what the killed rank had in hand and late"
    return books


def _kill(row: Row) -> str:
    return f"kill:rank=1,at=round:{row.kill_round}"


def _ends_well(row: Row, job: JobResult, kill: str) -> None:
    assert not any(job.last.codes), job.story
    assert f"injected {kill}" in job.report, "the job was over before the kill"
    assert job.attempts[1] > 1, job.story
    hashes = [HASH.findall(rank.stdout) for rank in job.last.ranks]
    assert all(hashes), f"a rank printed no weights, as one that comes after the end\n{job.story}"
    assert len({of_rank[-1] for of_rank in hashes}) == 1, job.story


def main(words: Sequence[str]) -> int:
    """Run trials by hand; print what came of each, and return the exit code."""
    kind, *names = words
    by_name = {row.name: row for row in rows()}
    if kind not in KINDS or not names or set(names) - by_name.keys():
        known = "\n".join(by_name)
        sys.stderr.write(f"usage: {'|'.join(KINDS)} ROW...; rows:\n{known}\n")
        return 2
    failed = 0
    for name in names:
        with temporary_folder() as folder:
            out = folder / "job"
            try:
                if kind == "late":
                    books = try_late(by_name[name], out)
                    result = f"{Late.GAINS if books.late else 'waits'}: {books}"
                else:
                    try_kill(by_name[name], out)
                    result = "yes"
            except AssertionError as error:
                result, failed = f"failed: {error}", failed + 1
        sys.stdout.write(f"{name} {kind}: {result}\n")
        sys.stdout.flush()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
