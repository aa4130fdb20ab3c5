"""How a thread's event loop ends with no connection left."""

from __future__ import annotations

import asyncio
from typing import Any, Final

TIMEOUT_S: Final = 10.0


async def close_server(server: asyncio.Server) -> None:
    """Close a server whose loop goes on, and lose no connection that it has just accepted.

    asyncio leaves the socket of such a connection open: its transport cannot be made for a server
    that is closed. So the server stops accepting, and closes when the transports have been made.
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
    connection with TLS takes several turns of the loop. A connection whose handshake was under way
    when its server closed gets its transport only in one of the next turns.
    """
    loop: Any = asyncio.get_running_loop()
    until_s = loop.time() + TIMEOUT_S
    while (len(asyncio.all_tasks()) > 1 or _is_connected(loop)) and loop.time() < until_s:
        for transport in list(loop._transports.values()):
            transport.abort()
        await asyncio.sleep(0.01)  # the loop has no event for it


def _is_connected(loop: Any) -> bool:
    """The loop watches one socket of its own."""
    return len(loop._selector.get_map()) > 1
