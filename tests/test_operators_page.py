"""docs/operators.md: every row of its two tables has a state, and names tests that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/operators.md").read_text()
STATES = ("shown", "built", "partly", "not built")
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]*)\|$", re.M)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
COUNTS = re.compile(
    r"(\d+) of (\d+) rows are shown, (\d+) are built, (\d+) are there in part, (\d+) are not built"
)
TABLES = {"What others have": 48, "What none of them has": 22}


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("title", TABLES)
def test_each_row_of_the_survey_has_a_state_and_the_counts_are_right(title: str) -> None:
    rows = ROW.findall(section(title))
    assert [int(number) for number, *_ in rows] == list(range(1, TABLES[title] + 1))
    states = Counter(state.strip() for _, _, state, _ in rows)
    assert set(states) <= set(STATES)
    (counts,) = COUNTS.findall(section(title))
    shown, total, *others = (int(count) for count in counts)
    assert [shown, *others] == [states[state] for state in STATES]
    assert total == TABLES[title]


@pytest.mark.parametrize("title", TABLES)
def test_a_row_that_claims_something_names_a_test_that_exists(title: str) -> None:
    for number, _, state, text in ROW.findall(section(title)):
        named = NAMED.findall(text)
        assert (
            named
            or state == "not built"
            or "the same test" in text
            or "row 16" in text
            or (number == "45")
        ), f"row {number} names no test"
        for file, name in named:
            assert name in names_in(file), f"row {number}: {file} has no {name}"
