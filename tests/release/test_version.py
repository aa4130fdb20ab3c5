"""The version is stored in one place, and every other place is written from it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import version

OTHER = "9.8.7"
EARLIER = {
    "CHANGELOG.md",
    "docs/upgrade.md",  # says which charts were tested
    "tests/cluster/test_control_plane.py",  # has a chart of its own
    "tests/operator/real/test_install.py",  # upgrades from the previous release
}
"""Files that may name an earlier release, which is the current one until the next release."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for path in version.PLACES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(version.ROOT / path, tmp_path / path)
    return tmp_path


def test_every_place_has_the_same_version() -> None:
    assert version.problems() == ""


def test_a_new_version_is_written_to_every_place(copy: Path) -> None:
    old = version.current()
    assert set(version.write(OTHER, copy)) == set(version.PLACES)
    assert version.current(copy) == OTHER
    assert version.problems(copy) == ""
    assert version.write(OTHER, copy) == []
    assert set(version.write(old, copy)) == set(version.PLACES)
    for path in version.PLACES:
        assert (copy / path).read_bytes() == (version.ROOT / path).read_bytes(), path


@pytest.mark.long
def test_no_other_file_names_the_version() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=version.ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    number = re.compile(rf"(?<![\w.]){re.escape(version.current())}(?![\w.])")
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".ipynb", ".mk", ".tpl", ""}
    for name in set(filter(None, listed)) - set(version.PLACES) - EARLIER:
        path = version.ROOT / name
        if path.suffix in kinds and path.is_file():
            assert not number.search(path.read_text()), (
                f"{name} names the version; add it to scripts/version.py, or read it from there"
            )


def test_version_drift_is_reported(copy: Path) -> None:
    chart = copy / "charts/paceline/Chart.yaml"
    chart.write_text(
        chart.read_text().replace(f"version: {version.current()}", f"version: {OTHER}")
    )
    (copy / "Dockerfile").write_text("FROM scratch\n")
    lines = version.problems(copy).splitlines()
    assert lines[0].startswith("charts/paceline/Chart.yaml says another version")
    assert lines[1].startswith("Dockerfile has no version where")
    assert len(lines) == 2


@pytest.mark.parametrize("wrong", ["1.2", "v1.2.3", "1.2.3rc1", "01.2.3", "1.2.3\n"])
def test_an_invalid_version_is_refused(copy: Path, wrong: str) -> None:
    with pytest.raises(version.VersionError, match="three numbers"):
        version.write(wrong, copy)


def test_the_command_prints_the_version_or_an_error() -> None:
    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.version", *words],
            cwd=version.ROOT,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    assert run() == (0, f"{version.current()}\n", "")
    assert run("one") == (
        1,
        "",
        "error: one is not a version; write three numbers, such as 1.2.3\n",
    )
