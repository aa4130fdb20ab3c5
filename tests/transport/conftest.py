"""The ranks of the conformance suite: one pool of processes for the whole session."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from transport.harness import FAILED, ProcessPool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the fixtures whether the test failed: its ranks may be anywhere and are not reused."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    before = shared_memory()
    pool = ProcessPool()
    yield pool
    pool.end()
    assert shared_memory() <= before, "a rank has left files in /dev/shm"
