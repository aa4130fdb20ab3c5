"""How to end a thread's event loop with no open connection."""

from __future__ import annotations

import asyncio
from typing import Any, Final

TIMEOUT_S: Final = 10.0


async def close_server(server: asyncio.Server) -> None:
    """Close a server of a loop that goes on, without leaking a connection it just accepted.

    asyncio leaves the socket of such a connection open, since a closed server makes no transport
    for it. So the server first stops accepting, and closes after the transports have been made.

    Args:
        server: the server to close.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener)
    for _ in range(2):
        await asyncio.sleep(0)
    server.close()


async def close_connections() -> None:
    """Abort every connection of the running loop, and wait until the loop has closed them.

    Call it after the servers are closed and the loop's own tasks have been canceled. Closing a
    connection with TLS takes several turns of the loop. A connection whose handshake was in
    progress when its server closed gets its transport only in one of the next turns.
    """
    loop: Any = asyncio.get_running_loop()
    until_s = loop.time() + TIMEOUT_S
    while (len(asyncio.all_tasks()) > 1 or _is_connected(loop)) and loop.time() < until_s:
        for transport in list(loop._transports.values()):
            transport.abort()
        await asyncio.sleep(0.01)  # the loop has no event for it


def _is_connected(loop: Any) -> bool:
    """Return True if the loop watches more sockets than its own."""
    return len(loop._selector.get_map()) > 1
