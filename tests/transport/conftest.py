"""The ranks of the conformance suite: one pool of processes for the whole session."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from testing import left_files
from tests.transport.harness import FAILED, ProcessPool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Mark a failed test, because the state of its ranks is unknown and they cannot be reused."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.end()
    assert left_files.left_of(pool.held) == []
