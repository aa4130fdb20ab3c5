"""The page on scripts lists every call that a job refuses, and the table is up to date."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import script_table
from scripts.layers import tree_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "runtime/paceline/train/script").glob("*.py"))
LETTERS_MIN = 6
"""Shortest part of a text that identifies it."""


def refusals() -> Iterator[list[str]]:
    """Return the constant parts of each text of UnsupportedError in the package."""
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UnsupportedError":
                yield list(constants(node.args[0]))


def constants(text: ast.expr) -> Iterator[str]:
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    for part in parts:
        if isinstance(part, ast.Constant):
            yield str(part.value).strip(" ,:[]")


def test_the_page_lists_every_refusal() -> None:
    page = script_table.PAGE.read_text()
    table = page.partition("## Refusals")[2]
    texts = list(refusals())
    assert len(texts) >= 7
    for parts in texts:
        words = [part for part in parts if len(part) >= LETTERS_MIN]
        assert words, f"a refusal without words: {parts}"
        assert any(all(part in line for part in words) for line in table.splitlines()), (
            f"docs/scripts.md has no refusal with {words}"
        )


def test_the_page_has_the_table_of_the_rows() -> None:
    assert script_table.markdown() == script_table.PAGE.read_text(), "run make generate"


def test_a_page_without_marks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "scripts.md"
    page.write_text("# Scripts\n")
    monkeypatch.setattr(script_table, "PAGE", page)
    with pytest.raises(LookupError, match="needs one line"):
        script_table.markdown()
