"""Every module that parses untrusted bytes has a row that states how its input is bounded."""

from __future__ import annotations

import ast

import msgspec
import pytest

from scripts import entry_points
from scripts.entry_points import Table


@pytest.mark.long
def test_every_parsing_module_has_a_row_and_every_row_has_existing_tests() -> None:
    problems = "\n  ".join(sorted(entry_points.problems()))
    assert not problems, f"docs/security/entry_points.yaml:\n  {problems}"


@pytest.mark.parametrize(
    ("source", "parses"),
    [
        ("import json\njson.loads(text)", True),
        ("import msgspec\nmsgspec.json.decode(data, type=X)", True),
        ("import msgspec\nd = msgspec.json.Decoder[int](int)", True),
        ("def f(line):\n    return line.recv(4)", True),
        ("_HEAD.unpack_from(data, 0)", True),
        ("step.recv_from", False),
        ("json.dumps(x)\nrecv(1)", False),
    ],
)
def test_parsers_and_sockets_are_found_in_the_source(source: str, parses: bool) -> None:
    assert entry_points.parses(ast.parse(source)) is parses


@pytest.mark.long
def test_missing_and_stale_rows_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = entry_points.table()
    first, *others = rows.entries
    changed = msgspec.structs.replace(first, modules=["runtime/paceline/clock.py"], tests=[])
    monkeypatch.setattr(entry_points, "table", lambda: Table([changed, *others], rows.own))
    problems = "\n".join(entry_points.problems())
    assert "runtime/paceline/clock.py is named and parses nothing" in problems
    assert f"{first.name} names no test" in problems
    assert f"{first.modules[0]} parses bytes and is in no row" in problems
