"""A native loop is built once and cached, and replaced where it cannot be built."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
from paceline.transport import native
from paceline.transport.mpi.peer_errors import PeerErrors
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


@pytest.mark.long
def test_a_library_is_built_once_and_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(REDUCE).paceline_reduce
    (built,) = cache.iterdir()  # and no temporary file
    monkeypatch.setenv("CC", "false")
    assert load(REDUCE).paceline_reduce
    assert list(cache.iterdir()) == [built]


@pytest.mark.long
def test_a_changed_source_or_header_is_built_again(cache: Path) -> None:
    load(REDUCE)
    changed, header = cache / "reduce.c", cache / HEADER
    shutil.copy(REDUCE.with_name(HEADER), header)
    for number, path in enumerate((changed, header), start=2):
        text = path.read_text() if path.exists() else REDUCE.read_text()
        path.write_text(text + "/* changed */\n")
        load(changed)
        assert len(list(cache.glob("*.so"))) == number


@pytest.mark.long
def test_a_library_installed_beside_its_source_is_used(
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


def test_without_a_compiler_the_error_has_a_hint(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(UnavailableError, match=r"no C compiler; hint: install one, or set CC"):
        load(REDUCE)


def test_the_error_names_a_compiler_that_fails(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(UnavailableError, match=r"/false failed"):
        load(REDUCE)
    assert list(cache.iterdir()) == []


def test_the_error_names_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(UnavailableError, match=str(cache)):
        load(REDUCE)


def test_the_cache_folder_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/paceline")


def test_a_rank_without_a_compiler_warns_that_deaths_may_end_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", str(cache / "missing"))
    errors = PeerErrors()
    errors.watch()
    errors.check()
    assert "no C compiler" in errors.unwatched
    assert "a peer that dies may end this rank with it: no C compiler" in caplog.text
    assert errors.count == 0


@pytest.mark.long
def test_a_rank_warns_if_mpi_ignores_the_library_for_errors(cache: Path) -> None:
    errors = PeerErrors()
    errors.watch()
    errors.check()  # no MPI has been started in this process
    assert "MPI was started before" in errors.unwatched
    assert list(cache.iterdir())
