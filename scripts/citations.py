"""Check that every citation has a target; `make check` lists those that have none.

A citation is a letter and a number, such as R14 or D3, in a comment, a docstring, a message or a
document. Its target is the table row or the heading with that number in docs/protocol.md or
docs/design/. A page of docs/ that code names must exist, with its anchor. A section of a text must
stand beside the name of that text, as in "PPoPP'20, section 4.2".
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

FOLDERS: Final = (
    *("benchmarks", "charts", "crds", "docs", "examples"),
    *("operator", "runtime", "scripts", "testing", "tests"),
)
SUFFIXES: Final = {".c", ".md", ".py", ".tpl", ".txt", ".yaml", ".yml"}
TARGETS: Final = ("docs/protocol.md", "docs/design/*.md")
LETTERS: Final = {
    "A": "a choice that the rules left open (docs/design/violations.md)",
    "C": "a decision about the cluster (docs/design/cluster.md)",
    "D": "a decision about a rank (docs/design/runtime.md)",
    "I": "a promise (docs/protocol.md)",
    "R": "a rule (docs/protocol.md)",
    "V": "a violation (docs/design/violations.md)",
}

NUMBER: Final = re.compile(rf"(?<![\w$./:=-])([{''.join(LETTERS)}])(\d{{1,2}})(?![\w/=]|\.\d)")
RANGE: Final = re.compile(NUMBER.pattern + r"-(?:\1)?(\d{1,2})(?!\w)")
TARGET: Final = re.compile(r"^(?:#+ |\| )([A-Z])(\d{1,2})\b", re.M)
SECTION: Final = re.compile(r"\bsections? \d+(?:\.\d+)*", re.I)
NAMED: Final = re.compile(r"(?:[A-Z][A-Za-z]+'\d\d|\bRFC \d+|\bMPI \d\.\d),? $")
"""Matches a venue with its year, or a standard, right before its section."""
PAGE: Final = re.compile(r"(?<![\w/])(docs/[\w/-]+\.md)(?:#([\w-]+))?")
NOQA: Final = re.compile(r"#\s*(?:noqa|type: ignore).*")


def problems(root: Path) -> str:
    """Return the citations without a target below `root`, one a line; empty if there is none."""
    pages = {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted((root / "docs").rglob("*.md"))
    }
    targets = targets_of(
        "\n".join(text for name, text in pages.items() if any(map(Path(name).match, TARGETS)))
    )
    return "".join(
        f"{path.relative_to(root)}:{problem}\n"
        for path in _files(root)
        for problem in without_target(path, targets, pages)
    )


def targets_of(text: str) -> set[str]:
    """Return the numbers that rows and headings of these pages explain."""
    return {f"{letter}{int(number)}" for letter, number in TARGET.findall(text)}


def without_target(path: Path, targets: set[str], pages: Mapping[str, str]) -> Iterator[str]:
    """Yield line, text and fault of each citation of a file that has no target.

    Args:
        path: File to read.
        targets: Numbers that have a target.
        pages: Documents by name.

    Yields:
        Citations, line by line.
    """
    for line, words in _words(path):
        for cited in _numbers(words):
            if f"{cited[0]}{int(cited[1:])}" not in targets:
                yield f"{line}: {cited}: there is no such number; {cited[0]} is {LETTERS[cited[0]]}"
        for match in SECTION.finditer(words):
            if not NAMED.search(words[: match.start()]):
                why = "of which text? Name the paper before it, or cite a page of docs/"
                yield f"{line}: {match.group()}: {why}"
        for match in PAGE.finditer(words):
            page, anchor = match.groups()
            if page not in pages:
                yield f"{line}: {match.group()}: there is no such page"
            elif anchor and anchor not in _anchors(pages[page]):
                yield f"{line}: {match.group()}: the page has no such heading"


def _numbers(words: str) -> Iterator[str]:
    for match in NUMBER.finditer(words):
        yield match.group()
    for match in RANGE.finditer(words):  # "R16-R18" and "D1-16" cite what lies between too
        letter, first, last = match.groups()
        yield from (f"{letter}{n}" for n in range(int(first) + 1, int(last) + 1))


def _words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that may cite: all lines of a document, comments and strings of Python.

    A string that consists of nothing but a number or a page is a value and does not count.

    Yields:
        Pairs of line number and text.
    """
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    if not any(pattern.search(text) for pattern in (NUMBER, SECTION, PAGE)):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind != "COMMENT" and kind != "STRING" and not kind.startswith("FSTRING"):
            continue
        value = token.string.strip("\"'")
        if kind == "STRING" and (NUMBER.fullmatch(value) or PAGE.fullmatch(value)):
            continue
        words = NOQA.sub("", token.string) if kind == "COMMENT" else token.string
        yield from enumerate(words.splitlines(), token.start[0])


def _anchors(page: str) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def _files(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("*.md"))
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            hidden = any(part.startswith((".", "__")) for part in path.relative_to(root).parts[:-1])
            if path.suffix in SUFFIXES and not hidden:
                yield path
