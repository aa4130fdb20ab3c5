"""The fork server for all tests that need processes with torch."""

from __future__ import annotations

import pytest

from testing.processes.forked_call import the_fork_server
from testing.processes.history import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    return the_fork_server()
