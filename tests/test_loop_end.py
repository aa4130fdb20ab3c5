"""A test server in a thread closes every connection before its event loop ends."""

from __future__ import annotations

import gc
import socket

import pytest

from testing.fake_cluster.proxy import Proxy


@pytest.mark.long
def test_a_proxy_closes_connections_that_arrive_while_it_stops() -> None:
    """A socket left open would be an error here: `filterwarnings = error`."""
    for _ in range(20):
        with Proxy("http://127.0.0.1:1") as proxy:
            address = ("127.0.0.1", proxy.port)
            callers = [socket.create_connection(address) for _ in range(4)]
        for caller in callers:
            caller.close()
    gc.collect()
