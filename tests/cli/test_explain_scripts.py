"""The first line of `paceline explain` for failed scripts, as docs/faults.md lists it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.processes.faulty import How, Plan, When
from testing.processes.faulty_run import carry_out
from tests.layers import exhaustive_except

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
SECTION = "## What `paceline explain` says first of a failed script"
KINDS = {
    "raises before `pl.init()`": Plan(2, "Full", True, When.BEFORE_INIT, How.OS_ERROR),
    "ends before `pl.init()`": Plan(2, "Full", True, When.BEFORE_INIT, How.SYS_EXIT_0),
    "crashes before its loop, on one rank": Plan(2, "Full", False, When.BEFORE_LOOP, How.CRASHES),
    "raises in the data set, at one sample": Plan(2, "Majority", False, When.IN_ITEM, How.OS_ERROR),
    "raises in a worker of the loader": Plan(2, "Full", False, When.IN_WORKER, How.KEY_ERROR),
    "crashes at one sample": Plan(2, "Full", False, When.IN_ITEM, How.CRASHES),
    "raises in its loop, on all ranks": Plan(3, "Full", True, When.IN_BATCH, How.KEY_ERROR),
    "calls `os._exit(7)` in its loop, on all ranks": Plan(
        2, "Solo", True, When.IN_BATCH, How.EXIT_7
    ),
    "calls `sys.exit(0)` in its loop, on one rank": Plan(
        2, "Full", False, When.IN_BATCH, How.SYS_EXIT_0
    ),
    "hangs in a batch, on all ranks": Plan(2, "Full", True, When.IN_BATCH, How.READS),
    "raises after its loop, on one rank": Plan(2, "Full", False, When.AFTER_LOOP, How.KEY_ERROR),
}


def listed() -> dict[str, str]:
    """Return the table of the page: kind of script -> first line."""
    section = PAGE.read_text().partition(SECTION)[2].partition("\n## ")[0]
    # A line that quotes a command in backticks is itself between two backticks.
    rows = re.findall(r"^\| (.+?) \| (`+) ?(.+?) ?\2 \|$", section, re.MULTILINE)
    return {kind: line for kind, _, line in rows}


def usual(line: str) -> str:
    """Return `line` without the parts that differ from run to run, such as ranks and samples."""
    line = re.sub(r"; (last lines:|all ranks that had the weights).*", "", line)
    line = re.sub(r" on ranks? \d.*", "", line)
    line = re.sub(r"rank \d+\.\d+#\d+(: )?", "", line)
    return re.sub(r"not called for \d+ s", "not called for N s", line)


def test_the_documentation_lists_each_kind_of_failing_script() -> None:
    assert list(listed()) == list(KINDS)
    assert len(KINDS) >= 10


@pytest.mark.processes
@pytest.mark.parametrize("kind", exhaustive_except(list(KINDS)[::2], KINDS))
def test_explain_begins_with_the_documented_cause(tmp_path: Path, kind: str) -> None:
    ended = carry_out(tmp_path, KINDS[kind])
    assert not ended.wrong, ended
    assert usual(ended.explained.splitlines()[0]) == usual(listed()[kind])
