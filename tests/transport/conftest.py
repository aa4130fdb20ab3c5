"""The ranks of the conformance suite: one pool of processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from transport.harness import ProcessPool


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    before = shared_memory()
    pool = ProcessPool()
    yield pool
    pool.end()
    assert shared_memory() <= before, "a rank has left files in /dev/shm"
