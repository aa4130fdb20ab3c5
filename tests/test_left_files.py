"""The search for files that a program under test left behind."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from paceline import scratch
from paceline.transport.shm.memory import SharedMemory

from testing import left_files


@pytest.fixture
def own(tmp_path: Path) -> left_files.OwnFiles:
    """Return a tracker for the files of this process; the test calls `look` itself."""
    return left_files.OwnFiles(lambda: [os.getpid()], tmp_path)


@pytest.fixture
def made(own: left_files.OwnFiles) -> Iterator[Path]:
    with NamedTemporaryFile(dir="/dev/shm", prefix="paceline-test-", delete=False) as file:
        file.write(b"x")
    path = Path(file.name)
    yield path
    path.unlink()


def test_a_file_that_was_open_or_mapped_and_still_exists_counts_as_left(
    own: left_files.OwnFiles, made: Path
) -> None:
    with made.open("r+b") as file:
        own.look()
        assert str(made) in own.created
        assert own.left(patience_s=0) == []
        mapping = mmap.mmap(file.fileno(), 0)
    assert own.left(patience_s=0) == [], "it is mapped"
    mapping.close()
    assert own.left(patience_s=0) == [str(made)]


@pytest.mark.long
def test_open_files_are_tracked_during_a_with_block(own: left_files.OwnFiles, made: Path) -> None:
    with made.open("r+b"), own:
        until_s = time.monotonic() + 60
        while str(made) not in own.created:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    assert own.left(patience_s=0) == [str(made)]


def test_files_left_by_another_job_are_ignored(own: left_files.OwnFiles, made: Path) -> None:
    """The other process holds the file open for a while, and is then killed."""
    own.look()
    with made.open("r+b") as file:
        other = subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()])
    own.look()
    other.kill()
    other.wait()
    own.look()
    assert own.left(patience_s=0) == []


def test_shared_memory_of_torch_counts_if_a_tracked_process_made_it(tmp_path: Path) -> None:
    maker, stranger = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
    own = left_files.OwnFiles(lambda: [maker.pid], tmp_path)
    own.look()
    names = [Path(f"/dev/shm/torch_{process.pid}_1_0") for process in (maker, stranger)]
    try:
        for process, name in zip((maker, stranger), names, strict=True):
            name.touch()
            process.kill()
            process.wait()
        own.look()
        assert own.left(patience_s=0) == [str(names[0])]
    finally:
        for name in names:
            name.unlink()


def test_shared_memory_noted_by_a_rank_counts_even_if_never_observed_open(
    own: left_files.OwnFiles, made: Path, tmp_path: Path
) -> None:
    rank = tmp_path / f"{scratch.PREFIX}a" / f"{scratch.PREFIX}b" / "rank"
    rank.mkdir(parents=True)
    own.look()
    assert own.left(patience_s=0) == []
    scratch.note_shared_memory(rank, made.name)
    own.look()
    assert own.left(patience_s=0) == [str(made)]


def test_only_files_held_by_the_process_count(made: Path) -> None:
    """Another job on this machine leaves files at the same time."""
    with made.open("r+b"), NamedTemporaryFile(dir="/dev/shm", prefix="other-", delete=False) as its:
        its.close()
        held = left_files.held_by(os.getpid())
        assert str(made) in held
        assert its.name not in held
        assert left_files.left_of(held, patience_s=0) == []
    try:
        assert left_files.left_of(held, patience_s=0) == [str(made)]
    finally:
        Path(its.name).unlink()
    assert left_files.left_of(set(), patience_s=0) == []


def test_files_that_existed_before_are_ignored(made: Path, tmp_path: Path) -> None:
    later = left_files.OwnFiles(lambda: [os.getpid()], tmp_path)
    with made.open("r+b"):
        later.look()
    assert later.left(patience_s=0) == []


def test_anonymous_shared_memory_is_found_while_open_or_mapped() -> None:
    own = os.getpid()
    before = left_files.memory_of(own)
    memory = SharedMemory()
    assert left_files.memory_of(own) != before
    memory.close()
    assert left_files.memory_of(own) != before, "it is mapped"
    del memory
    gc.collect()
    assert left_files.memory_of(own) == before
