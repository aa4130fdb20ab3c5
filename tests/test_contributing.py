"""The lists of CONTRIBUTING.md name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+|[A-Z]+\.md)`")


def lists() -> dict[str, str]:
    """Return the text of each list, by its heading."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## How to add\n")[2].partition("\n## ")[0]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in section.split("### ")[1:]}


def test_there_is_a_list_for_each_thing_that_is_added_often() -> None:
    wanted = {"A mode", "A transport", "A field of the job", "A metric and its panel"}
    assert set(lists()) == wanted | {"A verb of the command line"}


@pytest.mark.parametrize("thing", lists())
def test_every_file_of_a_list_exists(thing: str) -> None:
    named = PATH.findall(lists()[thing])
    missing = [path for path in named if not (ROOT / path).exists()]
    assert len(named) >= 6
    assert not missing


@pytest.mark.parametrize("thing", lists())
def test_a_list_ends_with_the_table_of_promises(thing: str) -> None:
    steps = re.findall(r"^\d+\. ", lists()[thing], re.M)
    assert [int(step[:-2]) for step in steps] == list(range(1, len(steps) + 1))
    assert "make generate" in lists()[thing].strip().splitlines()[-1]
