"""A rank's connection to the coordinator: its own thread, so that a busy rank stays reachable.

Orders go to the communication thread. Those that end what it may be blocked in (PREPARE, RELEASE,
DISMISS) raise the abort flag first. Every new connection begins with Register; what an older one
may have lost is repeated by the state machine (`Connected`).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable
from typing import Final

import aiohttp

from paceline.core import wire
from paceline.core.messages import (
    Dismiss,
    Heartbeat,
    Prepare,
    RankMessage,
    Register,
    Release,
    ToRank,
)
from paceline.transport.base import Abort

log = logging.getLogger("paceline.link")

BEAT_S: Final = 0.2
CONNECT_S: Final = 5.0
RETRY_S: Final = 0.05
RETRY_MAX_S: Final = 1.0
PING_S: Final = 10.0


class Interrupts:
    """Counts the orders that interrupt the communication thread and that it has not taken yet."""

    def __init__(self) -> None:
        self.abort = Abort()
        self._lock = threading.Lock()
        self._outstanding = 0

    @staticmethod
    def interrupts(order: object) -> bool:
        return isinstance(order, Prepare | Release | Dismiss)

    def arrived(self) -> None:
        with self._lock:
            self._outstanding += 1
            self.abort.raise_()

    def taken(self) -> None:
        with self._lock:
            self._outstanding -= 1
            if not self._outstanding:
                self.abort.clear()


class CoordinatorLink:
    """Keeps a connection to one of `urls`; everything else is up to the callbacks."""

    def __init__(
        self,
        urls: tuple[str, ...],
        token: str,
        *,
        register: Callable[[], Register],
        heartbeat: Callable[[], Heartbeat],
        obey: Callable[[ToRank], None],
        connected: Callable[[], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._urls = urls
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"}
        self._register, self._heartbeat = register, heartbeat
        self._obey, self._connected = obey, connected
        self._loop = asyncio.new_event_loop()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="paceline-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: RankMessage) -> None:
        """From any thread. Lost if there is no connection: the next one begins with the facts."""
        text = wire.to_json(message)
        self._loop.call_soon_threadsafe(self._send, text)

    def close(self) -> None:
        """Say what is still to be said and end the thread; bounded."""
        self._closing = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(CONNECT_S)

    # ---- the thread -----------------------------------------------------------------------

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _stop(self) -> None:
        # Messages were queued before this call, so they have been written by now.
        self._task.cancel()

    def _send(self, text: str) -> None:
        if self._socket is not None and not self._socket.closed:
            task = self._loop.create_task(self._socket.send_str(text))
            task.add_done_callback(_ignore_lost_connection)

    async def _run(self) -> None:
        delay_s, turn = RETRY_S, 0
        async with aiohttp.ClientSession(headers=self._headers) as session:
            while not self._closing:
                url = self._urls[turn % len(self._urls)]
                turn += 1
                try:
                    await self._connect(session, url)
                    delay_s = RETRY_S
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    log.debug("no coordinator at %s: %s", url, error)
                    delay_s = min(2 * delay_s, RETRY_MAX_S)
                finally:
                    self._socket = None
                await asyncio.sleep(delay_s)

    async def _connect(self, session: aiohttp.ClientSession, url: str) -> None:
        opening = session.ws_connect(
            f"{url}/v1/ranks",
            heartbeat=PING_S,
            ssl=self._tls if self._tls is not None else True,
        )
        async with await asyncio.wait_for(opening, CONNECT_S) as socket:
            await socket.send_str(wire.to_json(self._register()))
            self._socket = socket
            self._connected()
            beat = self._loop.create_task(self._beat(socket))
            try:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        self._obey(wire.message_to_rank(message.data))
            finally:
                beat.cancel()

    async def _beat(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while not socket.closed:
            await asyncio.sleep(BEAT_S)
            await socket.send_str(wire.to_json(self._heartbeat()))


def _ignore_lost_connection(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and isinstance(task.exception(), ConnectionError | aiohttp.ClientError):
        log.debug("a message to the coordinator was lost with its connection")
