"""One fork server for all tests that need processes with torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local.history import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started
