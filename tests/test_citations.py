"""The check of citations reports dangling ones and ignores text that is not a citation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import citations

PROTOCOL = "# The protocol\n\n## Rules\n\n| R1 | a rule | `log.py` |\n| R2 | another |\n"
DESIGN = "# A rank\n\n### D3 Gradients lie in the buffers\n\n| V4 | a violation |\n"
# Concatenated, so that the check does not find these as citations in this file.
RULE, DECISION, PAGE, SECTION = "R" + "9", "D" + "99", "docs/" + "no.md", "section" + " 4"
HERE = "docs/design/runtime.md"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "docs/protocol.md", PROTOCOL)
    write(tmp_path, HERE, DESIGN)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "line", "cited"),
    [
        ("runtime/a.py", f'"""Counts (R1, {RULE})."""\n', 1, RULE),
        ("runtime/a.py", f"x = 1\n\ny = 2  # not here ({DECISION})\n", 3, DECISION),
        ("tests/a.py", f'assert x, "{RULE}: said twice"\n', 1, RULE),
        ("tests/a.py", f'"""Lines,\n\nand a later one (R1-{RULE[1:]})."""\n', 3, "R3"),
        ("tests/core/V04_story.txt", f"# A story. {RULE}: repaired.\n", 1, RULE),
        (
            "charts/x/templates/_a.tpl",
            f"{{{{- /* Create only ({DECISION}). */ -}}}}\n",
            1,
            DECISION,
        ),
        ("docs/faults.md", f"\nA rank waits ({RULE}).\n", 2, RULE),
        ("runtime/a.c", f"/* See {PAGE}. */\n", 1, PAGE),
        ("runtime/a.py", f'"""As decided ({SECTION}, step 5)."""\n', 1, SECTION),
        ("docs/a.md", f"as eager-SGD does ({SECTION})\n", 1, SECTION),
        ("runtime/a.py", f"# {HERE}#gone\n", 1, f"{HERE}#gone"),
    ],
)
def test_a_citation_without_a_target_is_reported(
    root: Path, name: str, text: str, line: int, cited: str
) -> None:
    write(root, name, text)
    lines = citations.problems(root).splitlines()
    assert lines
    assert lines[0].startswith(f"{name}:{line}: {cited}: "), lines


@pytest.mark.parametrize(
    "text",
    [
        '"""Rules (R1, R2, D3) and a story (V4, V04)."""\n',
        f'"""R1-R2; {HERE}#d3-gradients-lie-in-the-buffers."""\n',
        f"{RULE} = 1\n",
        f'names = ["{RULE}"]  # noqa: C4\n',
        f'"""PPoPP\'20, {SECTION}.2; RFC 5869, {SECTION}."""\n',
        '"""Kubernetes v1.34, /api/v1, an H100, aws-C5.large, f=A1, C17x."""\n',
    ],
)
def test_valid_citations_and_other_text_are_not_reported(root: Path, text: str) -> None:
    write(root, "runtime/a.py", text)
    assert not citations.problems(root)


def test_a_citation_of_a_removed_row_is_reported(root: Path) -> None:
    write(root, "operator/a.py", '"""One, then the other (R2)."""\n')
    assert not citations.problems(root)
    write(root, "docs/protocol.md", PROTOCOL.replace("| R2 | another |\n", ""))
    assert citations.problems(root).startswith("operator/a.py:1: R2: there is no such number")
