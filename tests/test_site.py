"""The documentation as a site: dead links and pages without a place are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts import site


def copied(root: Path) -> Path:
    """Copy all that the site is made of, so that a test can damage it."""
    for name in (*site.COPIED, site.SETTINGS):
        source, target = site.ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    return root


def test_every_page_has_a_place_in_the_navigation() -> None:
    assert site.orphans() == []


@pytest.mark.parametrize("page", ["docs/new.md", "docs/how-to/new.md", "examples/new/README.md"])
def test_a_page_without_a_place_is_named(page: str, tmp_path: Path) -> None:
    root = copied(tmp_path)
    (root / page).parent.mkdir(parents=True, exist_ok=True)
    (root / page).write_text("# New\n")
    assert page in site.problems(root)


def test_versions_stand_side_by_side_and_the_newest_is_the_index(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").write_text("page")
    versions = tmp_path / "versions"
    for version in ("7.9.0", "7.10.0", "6.2.0", "7.9.0"):
        (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
        site.publish(versions, tmp_path)
    listed = [each["version"] for each in json.loads((versions / "versions.json").read_text())]
    assert listed == ["7.10.0", "7.9.0", "6.2.0"]
    assert "url=7.10.0/" in (versions / "index.html").read_text()
    assert (versions / "7.9.0/index.html").read_text() == "page"


def test_a_link_to_a_missing_file_is_named(tmp_path: Path) -> None:
    root = copied(tmp_path)
    with (root / "docs/concepts.md").open("a") as page:
        page.write("\n[dead](../examples/first/no-such-file.py)\n")
    problems = site.problems(root)
    assert "there is no such file" in problems
    assert "concepts.md" in problems


@pytest.mark.processes
def test_each_dead_link_between_pages_fails_the_build(tmp_path: Path) -> None:
    root = copied(tmp_path)
    dead = {
        "concepts.md": ("no-such-page.md", "page does not exist"),
        "glossary.md": ("limits.md#no-such-heading", "anchor does not exist"),
    }
    for name, (link, _) in dead.items():
        with (root / "docs" / name).open("a") as page:
            page.write(f"\n[dead]({link})\n")
    problems = site.problems(root)
    for name, (_, text) in dead.items():
        assert text in problems
        assert name in problems


@pytest.mark.processes
def test_the_site_has_the_pages_the_search_and_the_linked_files(tmp_path: Path) -> None:
    root = copied(tmp_path)
    assert site.problems(root) == ""
    for name in (
        "index.html",
        "search.json",
        "docs/concepts/index.html",
        "docs/pictures/quorum.svg",
        "examples/first/train.py",
    ):
        assert (root / "site" / name).is_file(), name
