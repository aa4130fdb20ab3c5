"""The agent's connection to the coordinator: evidence out, requests in.

The agent works on while the coordinator is away. Each new connection begins with AgentHello, which
names all processes that live and all that are known dead, so nothing that happened meanwhile is
lost; the addresses are tried in turn until one answers (C3).
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final

import aiohttp

from paceline.core import wire
from paceline.core.messages import AgentBeat, AgentDone, AgentHello, AgentMessage, ToAgent

log = logging.getLogger("paceline.agent")

BEAT_S: Final = 1.0
PING_S: Final = 5.0
"""A connection without an answer to a ping for so long is dead."""
CONNECT_S: Final = 5.0
RETRY_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
OUTBOX_MAX: Final = 256
"""Details of deaths kept while nobody listens; the fact itself is in AgentHello."""
FAREWELL_S: Final = 10.0
"""How long an agent whose ranks have ended tries to say so; the inventory says it too (R25)."""


class CoordinatorLink:
    def __init__(
        self,
        urls: tuple[str, ...],
        token: str,
        *,
        hello: Callable[[], AgentHello],
        beat: Callable[[], AgentBeat],
        obey: Callable[[ToAgent], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._urls = deque(urls)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._hello, self._beat, self._obey = hello, beat, obey
        self._tls = tls
        self._outbox: deque[AgentMessage] = deque(maxlen=OUTBOX_MAX)
        self._news = asyncio.Event()
        self._done: AgentDone | None = None
        self._farewell = False
        """AgentDone was sent over this connection."""
        self._delivered = asyncio.Event()
        self._complaint = ""
        self.connected = False
        self.connections = 0

    def send(self, message: AgentMessage) -> None:
        """At once if the coordinator is there; else with the next connection."""
        self._outbox.append(message)
        self._news.set()

    async def finish(self, done: AgentDone) -> bool:
        """Say that the pod has ended; true when the coordinator has read it."""
        self._done = done
        self._news.set()
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._delivered.wait()
        except TimeoutError:
            log.warning("the coordinator did not hear that this agent is done")
        return self._delivered.is_set()

    async def run(self) -> None:
        """Keep a connection until `finish` has delivered, or for ever."""
        delay_s = RETRY_S
        async with aiohttp.ClientSession(headers=self._headers) as session:
            while not self._delivered.is_set():
                before = self.connections
                try:
                    await self._connect(session, self._urls[0])
                    self._complain("the connection to the coordinator ended")
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._complain(_reason(self._urls[0], error))
                finally:
                    self.connected = False
                if self._delivered.is_set():
                    return
                self._urls.rotate(-1)
                if self.connections > before:
                    delay_s = RETRY_S
                # Not all agents of a job at the same moment when its coordinator comes back.
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _connect(self, session: aiohttp.ClientSession, url: str) -> None:
        opening = session.ws_connect(
            f"{url}/v1/agents",
            heartbeat=PING_S,
            timeout=aiohttp.ClientWSTimeout(ws_close=CONNECT_S),
            ssl=self._tls if self._tls is not None else True,
        )
        async with await asyncio.wait_for(opening, CONNECT_S) as socket:
            self._farewell = False
            await socket.send_str(wire.to_json(self._hello()))
            self.connected, self._complaint = True, ""
            self.connections += 1
            log.info("connected to the coordinator at %s", url)
            await self._exchange(socket)

    async def _exchange(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Both directions, until one of them ends."""
        tasks = (
            asyncio.create_task(self._read(socket)),
            asyncio.create_task(self._write(socket)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._farewell:
                await asyncio.wait(tasks, timeout=CONNECT_S)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        if self._farewell and socket.close_code not in (None, aiohttp.WSCloseCode.ABNORMAL_CLOSURE):
            # It answered our closing, which comes after all messages: it has read them.
            self._delivered.set()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            try:
                order = wire.message_to_agent(message.data)
            except wire.WireError as error:
                log.warning("the coordinator sent something that is no message: %s", error)
                continue
            self._obey(order)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            while self._outbox:
                await socket.send_str(wire.to_json(self._outbox[0]))
                self._outbox.popleft()
            if self._done is not None:
                await socket.send_str(wire.to_json(self._done))
                self._farewell = True
                await socket.close()
                return
            self._news.clear()
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._news.wait()
            except TimeoutError:
                await socket.send_str(wire.to_json(self._beat()))

    def _complain(self, text: str) -> None:
        """Once per reason, since a coordinator may be away for long."""
        if text != self._complaint:
            log.warning("%s; trying again", text)
            self._complaint = text


def _reason(url: str, error: BaseException) -> str:
    if isinstance(error, aiohttp.WSServerHandshakeError):
        if error.status in (401, 403):
            return f"the coordinator at {url} refuses the token: it belongs to another job"
        return f"{url} answers {error.status}, which no coordinator does"
    if isinstance(error, TimeoutError):
        return f"no answer from the coordinator at {url} within {CONNECT_S:g} s"
    return f"no coordinator at {url}: {error}"
