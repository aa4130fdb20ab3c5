"""One open web socket of a pod, as the coordinator sees it.

Sending never blocks: messages wait in a bounded queue that a task of the connection empties. Who
does not read for so long that the queue fills loses the connection and has to greet again, so a
slow or stopped agent holds up nobody else (docs/design/control-channel.md).
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import WSMsgType, web
from msgspec import Struct

from paceline.control.front import caller_of
from paceline.core.wire import to_json
from paceline.refusals import Reason

QUEUE_MAX: Final = 512
"""Messages. A generation change sends a handful to each rank, and most of them to all at once."""
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A report of 4,096 members is below 0.5 MiB; a greeting has no more of each rank."""


class Connection:
    """`send` and `abort` may be called at any time, also after the end."""

    def __init__(self, request: web.Request, token: str) -> None:
        """`token`: the one that the caller has shown."""
        self._request = request
        self.token = token
        self.socket = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES_MAX)
        self._queue: asyncio.Queue[str] = asyncio.Queue(QUEUE_MAX)
        self._writer: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises ConnectionError if the client has gone meanwhile."""
        await self.socket.prepare(self._request)
        self._writer = asyncio.create_task(self._write())

    async def receive(self, timeout_s: float | None = None) -> str | None:
        """The next message, None at the end. Raises TimeoutError."""
        message = await self.socket.receive(timeout_s)
        return str(message.data) if message.type is WSMsgType.TEXT else None

    def send(self, message: Struct) -> None:
        try:
            self._queue.put_nowait(to_json(message))
        except asyncio.QueueFull:
            self.abort()

    def refuse_token(self) -> None:
        """Count that this connection is ended because its token was revoked."""
        caller_of(self._request).refuse(Reason.UNAUTHENTICATED, "its token was revoked")

    def abort(self) -> None:
        """End it at once; `receive` then returns None. What is still queued is lost."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def close(self) -> None:
        """Called by the reader when it has seen the end."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
        if not self.socket.closed:  # else it was closed in order, by the other side
            self.abort()

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything queued so far was written, but not longer than this."""
        if self._writer is not None:
            joined = asyncio.ensure_future(self._queue.join())
            await asyncio.wait(
                [joined, self._writer], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            joined.cancel()

    async def _write(self) -> None:
        while True:
            text = await self._queue.get()
            try:
                await self.socket.send_str(text)
            except ConnectionError:
                return
            finally:
                self._queue.task_done()
