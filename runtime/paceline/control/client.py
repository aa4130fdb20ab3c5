"""The client's end of the control channel: one connection to a job's coordinator, made again
whenever it ends.

A coordinator may be away for as long as it likes (R10). The addresses are tried in turn until one
answers, and every connection begins with a greeting that holds all facts, so nothing that happened
meanwhile is lost. No fault of what the client is given to call ends it in silence: a beat that
cannot be made is left out, any other call that raises costs the connection, and both are logged.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import aiohttp
import msgspec

from paceline.core import wire
from paceline.core.messages import BeatEvery

log = logging.getLogger("paceline.control")

CONNECT_S: Final = 5.0
"""For the opening of a connection, and for its closing."""
OUTBOX_MAX: Final = 256
"""Messages that wait for a connection; the greeting says the same in short."""

Order = TypeVar("Order")


@dataclass(frozen=True, slots=True)
class Pace:
    beat_s: float
    ping_s: float
    """A connection without an answer to a ping for so long is dead."""
    retry_s: float
    retry_max_s: float
    """Between two attempts; the first is doubled up to this."""


class ControlClient(Generic[Order]):
    def __init__(
        self,
        urls: tuple[str, ...],
        path: str,
        token: str,
        *,
        pace: Pace,
        greet: Callable[[], msgspec.Struct],
        beat: Callable[[], msgspec.Struct],
        decode: Callable[[str], Order | BeatEvery],
        obey: Callable[[Order], None],
        keeps: bool,
        figures: Callable[[], msgspec.Struct] | None = None,
        connected: Callable[[], None] = lambda: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`keeps`: what is sent while nobody listens goes out with the next connection; else it is
        lost. `connected` is called after each greeting. `figures` go with every so many beats, as
        the coordinator wants it."""
        self._urls = deque(urls)
        self._path = path
        self._headers = {"Authorization": f"Bearer {token}"}
        self._pace = pace
        self._greet, self._beat, self._decode, self._obey = greet, beat, decode, obey
        self._keeps, self._connected = keeps, connected
        self._figures = figures
        self._tls = tls
        self._outbox: deque[msgspec.Struct] = deque(maxlen=OUTBOX_MAX)
        self._news = asyncio.Event()
        self._rhythm = BeatEvery(int(1000 * pace.beat_s), 1)
        self._due_s = 0.0
        self._beats = 0
        self._leaving = False
        self._last: msgspec.Struct | None = None
        self._farewell = False
        """All was said over this connection, and it is being closed."""
        self._complaint = ""
        self.left = asyncio.Event()
        """The coordinator has read everything up to the last word."""
        self.connected = False
        self.connections = 0

    def send(self, message: msgspec.Struct) -> None:
        """At once if the coordinator is there."""
        if self._keeps or self.connected:
            self._outbox.append(message)
            self._news.set()

    def leave(self, last: msgspec.Struct | None = None) -> None:
        """Say what is still to be said, then `last`, and end `run`."""
        self._leaving, self._last = True, last
        self._news.set()

    async def run(self) -> None:
        """Keep a connection until it was left, or for ever."""
        delay_s = self._pace.retry_s
        async with aiohttp.ClientSession(headers=self._headers) as session:
            while True:
                url, before, fault = self._urls[0], self.connections, None
                try:
                    await self._connect(session, url)
                    why = "the connection to the coordinator ended"
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    why = _reason(url, error)
                except Exception as error:
                    why = f"the connection to the coordinator was given up after {error!r}"
                    fault = error
                finally:
                    self.connected = False
                    if not self._keeps:
                        self._outbox.clear()
                if self.left.is_set() or (self._leaving and not self._keeps):
                    return
                self._complain(why, fault)
                self._urls.rotate(-1)
                if self.connections > before and fault is None:
                    delay_s = self._pace.retry_s
                # Not all processes of a job at the same moment when its coordinator comes back.
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, self._pace.retry_max_s)

    async def _connect(self, session: aiohttp.ClientSession, url: str) -> None:
        opening = session.ws_connect(
            f"{url}{self._path}",
            heartbeat=self._pace.ping_s,
            timeout=aiohttp.ClientWSTimeout(ws_close=CONNECT_S),
            ssl=self._tls if self._tls is not None else True,
        )
        async with await asyncio.wait_for(opening, CONNECT_S) as socket:
            self._farewell = False
            self._rhythm = BeatEvery(int(1000 * self._pace.beat_s), 1)
            self._due_s = asyncio.get_running_loop().time() + self._pace.beat_s
            await socket.send_str(wire.to_json(self._greet()))
            self.connected, self._complaint = True, ""
            self.connections += 1
            log.info("connected to the coordinator at %s", url)
            self._connected()
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
            self.left.set()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            try:
                order = self._decode(message.data)
            except wire.WireError as error:
                log.warning("the coordinator sent something that is no message: %s", error)
                continue
            if isinstance(order, BeatEvery):
                self._beat_every(order)
            else:
                self._obey(order)

    def _beat_every(self, rhythm: BeatEvery) -> None:
        """Thousands are told at the same moment: the next beats are spread over the interval."""
        self._rhythm = rhythm
        interval_s = rhythm.ms / 1000
        self._due_s = asyncio.get_running_loop().time() + random.uniform(0, interval_s)
        self._beats = random.randrange(rhythm.figures)
        self._news.set()

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._outbox:
                await socket.send_str(wire.to_json(self._outbox[0]))
                self._outbox.popleft()
            if self._leaving:
                if self._last is not None:
                    await socket.send_str(wire.to_json(self._last))
                self._farewell = True
                await socket.close()
                return
            self._news.clear()
            try:
                async with asyncio.timeout_at(self._due_s):
                    await self._news.wait()
            except TimeoutError:
                await self._say_alive(socket)
                self._due_s = loop.time() + self._rhythm.ms / 1000

    async def _say_alive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            said = [wire.to_json(self._beat())]
            if self._figures is not None and self._beats % self._rhythm.figures == 0:
                said.append(wire.to_json(self._figures()))
        except Exception as error:
            # It reads what other threads change; the next one may well be made.
            self._complain(f"a heartbeat could not be made: {error!r}", error)
            return
        self._beats += 1
        for text in said:
            await socket.send_str(text)

    def _complain(self, text: str, fault: Exception | None = None) -> None:
        """Once per reason, since a coordinator may be away for long."""
        if text != self._complaint:
            log.warning("%s; trying again", text, exc_info=fault)
            self._complaint = text


def _reason(url: str, error: BaseException) -> str:
    if isinstance(error, aiohttp.WSServerHandshakeError):
        if error.status in (401, 403):
            return f"the coordinator at {url} refuses the token: it belongs to another job"
        return f"{url} answers {error.status}, which no coordinator does"
    if isinstance(error, TimeoutError):
        return f"no answer from the coordinator at {url} within {CONNECT_S:g} s"
    return f"no coordinator at {url}: {error}"
