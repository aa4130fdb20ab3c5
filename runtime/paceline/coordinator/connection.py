"""Open web socket of a pod, on the coordinator's side.

Sending never blocks: messages wait in a bounded queue that a task of the connection empties. If a
pod does not read for so long that the queue fills, the connection is closed and the pod has to
greet again. So a slow or stopped agent delays no other pod (docs/design/control-channel.md).
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import WSMsgType, web
from msgspec import Struct

from paceline.control.front import caller_of
from paceline.core.wire import to_json
from paceline.refusals import RefusalReason

QUEUE_MAX: Final = 512
"""Maximum number of queued messages. A change of the membership sends a handful to each rank, and
most of them to all at once."""
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum size of a received message, in bytes. A report of 4,096 members is below 0.5 MiB; a
greeting has no more per rank."""


class Connection:
    """Web socket of one pod, on the event loop of the server.

    `send` and `abort` may be called at any time, also after the end.
    """

    def __init__(self, request: web.Request, token: str) -> None:
        """Prepare a connection; `open` completes the handshake.

        Args:
            request: The request to open a web socket.
            token: The token that the caller has sent.
        """
        self._request = request
        self.token = token
        self.socket = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES_MAX)
        self._queue: asyncio.Queue[str] = asyncio.Queue(QUEUE_MAX)
        self._writer: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Complete the handshake and start to write; ConnectionError if the client has gone."""
        await self.socket.prepare(self._request)
        self._writer = asyncio.create_task(self._write())

    async def receive(self, timeout_s: float | None = None) -> str | None:
        """Return the next message, or None at the end of the connection.

        The call raises TimeoutError if no message comes in time.

        Args:
            timeout_s: How long to wait, in seconds; None for no limit.

        Returns:
            The text of the message. A message that is not text counts as the end.
        """
        message = await self.socket.receive(timeout_s)
        return str(message.data) if message.type is WSMsgType.TEXT else None

    def send(self, message: Struct) -> None:
        """Queue a message; abort the connection if the queue is full."""
        try:
            self._queue.put_nowait(to_json(message))
        except asyncio.QueueFull:
            self.abort()

    def refuse_token(self) -> None:
        """Count that this connection is ended because its token was revoked."""
        caller_of(self._request).refuse(RefusalReason.UNAUTHENTICATED, "its token was revoked")

    def abort(self) -> None:
        """End the connection at once; `receive` then returns None. Queued messages are lost."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def close(self) -> None:
        """Stop the writer and end the connection. The reader calls this at the end."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
        if not self.socket.closed:  # else the other side has closed it in order
            self.abort()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all messages queued so far are written, but no longer than `timeout_s`."""
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
