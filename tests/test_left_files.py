"""What tests look for after a program: files that it left, not those that others use."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from paceline.transport.shm.memory import SharedMemory

from testing import left_files


@pytest.fixture
def before() -> set[str]:
    return left_files.files()


@pytest.fixture
def made(before: set[str]) -> Iterator[Path]:
    with NamedTemporaryFile(dir="/dev/shm", prefix="paceline-test-", delete=False) as file:
        file.write(b"x")
    path = Path(file.name)
    yield path
    path.unlink()


def test_a_file_that_nobody_uses_was_left(before: set[str], made: Path) -> None:
    assert str(made) in left_files.left_since(before, patience_s=0)


def test_an_open_or_mapped_one_was_not(before: set[str], made: Path) -> None:
    with made.open("r+b") as file:
        assert str(made) not in left_files.left_since(before, patience_s=0)
        mapping = mmap.mmap(file.fileno(), 0)
    assert str(made) not in left_files.left_since(before, patience_s=0)
    mapping.close()
    assert str(made) in left_files.left_since(before, patience_s=0)


def test_only_what_a_process_held_is_its_own(made: Path) -> None:
    """Another job of this machine leaves files at the same time."""
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


def test_one_that_was_there_before_does_not_count(made: Path) -> None:
    assert str(made) not in left_files.left_since(left_files.files(), patience_s=0)


def test_memory_without_a_name_is_found_where_it_is_open_or_mapped() -> None:
    own = os.getpid()
    before = left_files.memory_of(own)
    memory = SharedMemory()
    assert left_files.memory_of(own) != before
    memory.close()
    assert left_files.memory_of(own) != before, "it is mapped"
    del memory
    gc.collect()
    assert left_files.memory_of(own) == before
