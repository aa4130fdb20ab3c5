"""A native loop is built once and cached, and replaced where it cannot be built."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
from paceline.transport import native
from paceline.transport.native import (
    HEADER,
    REDUCE,
    SHARED,
    SOURCES,
    UnavailableError,
    cache_folder,
    load,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline"


def test_it_is_built_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(REDUCE).paceline_reduce
    (built,) = cache.iterdir()  # and no temporary file
    monkeypatch.setenv("CC", "false")
    assert load(REDUCE).paceline_reduce
    assert list(cache.iterdir()) == [built]


def test_another_source_is_another_library(cache: Path) -> None:
    load(REDUCE)
    changed, header = cache / "reduce.c", cache / HEADER
    shutil.copy(REDUCE.with_name(HEADER), header)
    for number, path in enumerate((changed, header), start=2):
        text = path.read_text() if path.exists() else REDUCE.read_text()
        path.write_text(text + "/* changed */\n")
        load(changed)
        assert len(list(cache.glob("*.so"))) == number


def test_what_an_image_has_beside_the_source_is_taken(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "installed"
    package.mkdir()
    installed = [package / source.name for source in SOURCES]
    for source in (*SOURCES, REDUCE.with_name(HEADER)):
        shutil.copy(source, package)
    monkeypatch.setattr(native, "SOURCES", installed)
    runpy.run_module("paceline.transport.native", run_name="__main__")
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    assert load(installed[SOURCES.index(REDUCE)]).paceline_reduce
    assert load(installed[SOURCES.index(SHARED)]).paceline_shared


def test_without_a_compiler_it_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(UnavailableError, match=r"no C compiler; hint: install one, or set CC"):
        load(REDUCE)


def test_a_compiler_that_fails_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(UnavailableError, match=r"/false failed"):
        load(REDUCE)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(UnavailableError, match=str(cache)):
        load(REDUCE)


def test_the_cache_is_where_the_user_keeps_such_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/paceline")
