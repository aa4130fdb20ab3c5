"""One nursery for all tests that need processes with torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local.history import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started
