"""The English of the code: the faults that a program can find (CONTRIBUTING.md, "Words")."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import sample_prose

RETIRED = re.compile(r"^test_(what|who|whose|how|of)_|_(told|whoever|is_said|says_so)(_|$)")
"""In the name of a test these words stand for what happens, which the name shall say."""

CLUMSY = re.compile(
    r"(?<!there )(?<!it )\bis no (?!longer|more)[a-z]|\b(speaks|says nothing|said nothing)\b"
)
"""Words in an error text that stand for "is not a", "supports" and "sends nothing"."""


@pytest.fixture(scope="module")
def everything() -> list[sample_prose.Prose]:
    return [text for path in sample_prose.sources() for text in sample_prose.without_comments(path)]


@pytest.mark.long
def test_no_docstring_begins_as_a_fragment(everything: list[sample_prose.Prose]) -> None:
    wrong = [
        f"{text.path}:{text.line}: {text.text.splitlines()[0]}"
        for text in everything
        if text.kind == "docstring" and sample_prose.FRAGMENT.match(text.text)
    ]
    assert not wrong, "\n".join([f"{len(wrong)} fragments", *wrong[:40]])


def test_no_comment_begins_as_a_fragment() -> None:
    wrong = [
        f"{path}: {comment[1]}"
        for path in sample_prose.sources()
        for comment in sample_prose.COMMENT_FRAGMENT.finditer(path.read_text())
    ]
    assert not wrong, "\n".join([f"{len(wrong)} comments", *wrong[:40]])


@pytest.mark.long
def test_names_of_tests_say_the_behavior(everything: list[sample_prose.Prose]) -> None:
    wrong = [
        f"{text.path}:{text.line}: {text.text}"
        for text in everything
        if text.kind == "test name" and RETIRED.search(text.text)
    ]
    assert not wrong, "\n".join([f"{len(wrong)} names", *wrong[:40]])


def test_error_texts_use_plain_words(everything: list[sample_prose.Prose]) -> None:
    wrong = [
        f"{text.path}:{text.line}: {text.text}"
        for text in everything
        if text.kind == "error text" and CLUMSY.search(text.text)
    ]
    assert not wrong, "\n".join([f"{len(wrong)} error texts", *wrong[:40]])


def test_every_kind_of_text_is_found(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        '"""A module."""\n\n'
        "LIMIT = 3\n"
        '"""Of all of them."""\n\n'
        "# One comment\n# on two lines.\n"
        "def test_a_thing():  # beside the code\n"
        "    # below it\n"
        '    raise ValueError(f"{LIMIT} is too much for anybody")\n'
    )
    texts = {(text.kind, text.line, text.text) for text in sample_prose.texts(path, tmp_path)}
    assert texts == {
        ("docstring", 1, "A module."),
        ("docstring", 4, "Of all of them."),
        ("comment", 6, "One comment on two lines."),
        ("comment", 8, "beside the code"),
        ("test name", 8, "test_a_thing"),
        ("comment", 9, "below it"),
        ("error text", 10, "{} is too much for anybody"),
    }
