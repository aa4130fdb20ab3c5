"""The table of training scripts names every script, and says why one is refused."""

from __future__ import annotations

from testing.scripts.table import PROGRAMS, SHARED, Expectation, rows


def test_every_script_is_in_the_table() -> None:
    there = {path.name for path in PROGRAMS.glob("*.py")} - SHARED
    assert {row.script for row in rows()} == there


def test_names_of_rows_are_unique() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)


def test_only_refused_scripts_have_a_reason() -> None:
    assert [
        row.name for row in rows() if bool(row.reason) != (row.expect is Expectation.REFUSED)
    ] == []
