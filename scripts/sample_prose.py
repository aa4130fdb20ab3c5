"""`python -m scripts.sample_prose --seed N`: read some of the code's English, chosen at random.

It prints ten docstrings, comments, test names and error texts each, with file and line. They shall
read like the right-hand column of a style guide; mend the kind of fault that shows, and not the
place. tests/test_prose.py looks in all texts for the faults that a program can find.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.layers import ROOT, tree_of

FOLDERS: Final = (
    *("benchmarks", "crds", "examples", "operator"),
    *("runtime", "scripts", "testing", "tests"),
)
KINDS: Final = ("docstring", "comment", "test name", "error text")
FRAGMENT: Final = re.compile(r"(Of|By|As|So|So long|Likewise|Whether|Whose|Of whom|Its|Their)\b")
"""How a docstring begins that makes sense only to whoever wrote it."""
COMMENT_FRAGMENT: Final = re.compile(
    r"^(?!\s*#).*\n\s*# ((?:As|What|So that|Of|By|Whose|Whether|Likewise)\b.*)", re.M | re.I
)
"""First line of a comment that continues no sentence and begins as if it did."""
_NO_SENTENCE: Final = re.compile(r"#\s*(noqa|type:|pragma|fmt:|ruff:|mypy:|!|-{3,}|={3,})")
_ERROR: Final = re.compile(r"(Error|Failed|Unusable|Lost|Aborted|Exception)$")
_LETTERS_MIN: Final = 12
"""Shorter texts are no sentences."""


@dataclass(frozen=True, slots=True)
class Prose:
    """One text that a person wrote for a person."""

    kind: str
    path: str
    line: int
    text: str


def sources(root: Path = ROOT) -> list[Path]:
    """Return the Python files of the repository, without what is installed or built in it."""
    return [
        path
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]


def texts(path: Path, root: Path = ROOT) -> Iterator[Prose]:
    """Return all texts of one file."""
    yield from without_comments(path, root)
    yield from _comments(path.read_text(), str(path.relative_to(root)))


def without_comments(path: Path, root: Path = ROOT) -> Iterator[Prose]:
    """Return all texts of one file but its comments, which take as long as all others."""
    name = str(path.relative_to(root))
    for node in ast.walk(tree_of(path)):
        for line, text in _docstrings(node):
            yield Prose("docstring", name, line, text)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Prose("test name", name, node.lineno, node.name)
        if isinstance(node, ast.Call) and _ERROR.search(_called(node)):
            for argument in node.args[:1]:
                if text := _literal(argument):
                    yield Prose("error text", name, argument.lineno, text)


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for statement in body:
        match statement:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield statement.lineno, text


def _comments(source: str, name: str) -> Iterator[Prose]:
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _NO_SENTENCE.match(token.string):
            continue
        line, column = token.start
        beside_code = bool(token.line[:column].strip())
        if block and line == last + 1 and not beside_code:
            block.append(token.string.lstrip("# "))
        else:
            if block:
                yield Prose("comment", name, first, " ".join(block))
            block, first = [token.string.lstrip("# ")], line
        last = 0 if beside_code else line  # a comment beside code ends with its line
    if block:
        yield Prose("comment", name, first, " ".join(block))


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _literal(node: ast.expr) -> str:
    """Return a string, with {} where something is filled in; empty if it is none."""
    match node:
        case ast.Constant(value=str(text)) if len(text) >= _LETTERS_MIN:
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts
            )
    return ""


def main() -> int:
    """Print the sample."""
    parser = argparse.ArgumentParser(description="a random sample of the code's English")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=10, help="how many of each kind")
    given = parser.parse_args()
    dice = random.Random(given.seed)
    all_texts = [text for path in sources() for text in texts(path)]
    for kind in KINDS:
        mine = [text for text in all_texts if text.kind == kind]
        print(f"\n{kind}, {min(given.each, len(mine))} of {len(mine):,}\n")
        for text in dice.sample(mine, min(given.each, len(mine))):
            print(f"{text.path}:{text.line}")
            print(textwrap.indent(textwrap.dedent(text.text).strip(), "    "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
