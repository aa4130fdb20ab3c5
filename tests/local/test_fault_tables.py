"""The tables of docs/faults.md and docs/mistakes.md cover every fault and name existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from testing.processes.drawing import FAULTS

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", ["faults", "mistakes"])
def test_each_test_named_in_the_tables_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert named
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, f"{file} has no {name}"


def test_each_row_of_the_mistakes_names_a_test() -> None:
    for row in (ROOT / "docs" / "mistakes.md").read_text().splitlines():
        if row.startswith("| ") and not row.startswith("| mistake"):
            assert NAMED.search(row), row


def test_each_fault_of_the_histories_has_a_row() -> None:
    page = (ROOT / "docs" / "faults.md").read_text().partition("## What `paceline explain`")[0]
    rows = re.findall(r"\| `([^`]+)` \|$", page, re.M)
    histories = [row for row in rows if not row.startswith("tests/")]
    assert sorted(histories) == sorted(FAULTS)
