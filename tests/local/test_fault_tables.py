"""The tables of docs/faults.md cover every fault and name existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from testing.processes.drawing import FAULTS

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_each_test_named_in_the_tables_exists() -> None:
    named = NAMED.findall((ROOT / "docs/faults.md").read_text())
    assert named
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, f"{file} has no {name}"


def test_each_fault_of_the_histories_has_a_row() -> None:
    page = (ROOT / "docs" / "faults.md").read_text().partition("## What `paceline explain`")[0]
    rows = re.findall(r"\| `([^`]+)` \|$", page, re.M)
    histories = [row for row in rows if not row.startswith("tests/")]
    assert sorted(histories) == sorted(FAULTS)
