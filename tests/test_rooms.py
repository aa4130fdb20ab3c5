"""The table of sizes in docs/architecture.md names every folder of the product, with its lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.layers import tree_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/architecture.md"
OUTSIDE = ("tests", "testing", "build", "dist", "runs", "site")
"""Folders that the table leaves out: tests, and what is generated."""
TOLERANCE = 0.05
LEAST = 150
"""Lines by which a small room may differ from the table."""


class Room(NamedTuple):
    """One row of the table; the numbers of lines are rounded to hundreds."""

    name: str
    folders: tuple[str, ...]
    now: int
    code: int


class Lines(NamedTuple):
    """Lines of some files."""

    every: int = 0
    code: int = 0
    """Lines that are neither empty, a comment alone, nor part of a docstring."""


@cache
def rooms() -> tuple[Room, ...]:
    """Return the rows of the table."""
    text = (ROOT / PAGE).read_text().partition("## How large it is")[2]
    rows = []
    for row in re.findall(r"^\| .* \|$", text, re.M):
        name, folders, _, _, lines, code = row.strip("| ").split(" | ")
        if paths := re.findall(r"`([^`]+)`", folders):
            numbers = (int(text.replace(",", "")) for text in (lines, code))
            rows.append(Room(name, tuple(paths), *numbers))
    return tuple(rows)


def count(path: Path) -> Lines:
    """Return the lines of one file."""
    source = path.read_text()
    lines = source.splitlines()
    left_out = {n for n, line in enumerate(lines, 1) if not line.strip() or line.strip()[0] == "#"}
    for node in ast.walk(tree_of(path)):
        body: object = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                    left_out |= set(range(first, last + 1))
    return Lines(len(lines), len(lines) - len(left_out))


def room_of(name: str) -> str:
    """Return the room of a file: the one with the longest part of its path."""
    fits = [(len(f), r.name) for r in rooms() for f in r.folders if f"{name}/".startswith(f"{f}/")]
    return max(fits, default=(0, ""))[1]


def sources() -> Iterator[Path]:
    """Yield the Python files of the product."""
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in OUTSIDE:
            yield from folder.rglob("*.py")


@pytest.mark.long
def test_the_table_of_sizes_agrees_with_the_files() -> None:
    sums = {room.name: Lines() for room in rooms()}
    for path in sources():
        name = room_of(path.relative_to(ROOT).as_posix())
        assert name, f"{PAGE}: {path} belongs to no part; add its folder to the table"
        sums[name] = Lines(*map(sum, zip(sums[name], count(path), strict=True)))
    assert len(sums) > 10
    wrong = [
        f"{PAGE}: write {lines.every:,} lines and {lines.code:,} of code for {room.name}"
        for room in rooms()
        for lines in (sums[room.name],)
        if differs(lines.every, room.now) or differs(lines.code, room.code)
    ]
    assert not wrong, "\n".join(wrong)


def differs(actual: int, written: int) -> bool:
    """Return True if a number of the table is too far from the actual one."""
    return abs(actual - written) > max(LEAST, TOLERANCE * actual)
