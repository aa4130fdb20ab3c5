"""Client side of the control channel: one connection to a coordinator, reconnected when it ends.

A coordinator may be away for any length of time (R10). The addresses are tried in turn until one
answers. Every connection begins with a greeting that holds all facts, so nothing that happened
meanwhile is lost. After an attempt without an answer the next timeout at that address is twice as
long: a coordinator that a whole job calls at once is busy with TLS handshakes, and each attempt
that is given up costs it another one.

An exception in a callback does not end the client silently. A heartbeat whose callback raises is
skipped. Any other callback that raises costs the connection. Both are logged.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import aiohttp
import msgspec
from aiohttp.connector import AddrInfoType

from paceline.core import wire
from paceline.core.messages import BeatEvery

log = logging.getLogger("paceline.control")

OPEN_S: Final = 5.0
"""Timeout of the first attempt to connect to an address. It doubles without an answer."""
OPEN_MAX_S: Final = 40.0
"""Upper bound on the timeout of an attempt to connect."""
CALLS: Final = 2
"""Number of further SYN packets that the kernel sends to an address that does not answer at all.
That takes 7 s. After that the address is assumed to be unused, and the next one is tried."""
CLOSE_S: Final = 5.0
"""Timeout for the coordinator's answer when the connection is closed."""
OUTBOX_MAX: Final = 1024
"""Maximum number of unsent messages. With more, the connection is closed."""

Order = TypeVar("Order")
"""Type of the messages from the coordinator."""


@dataclass(frozen=True, slots=True)
class ControlTiming:
    """Intervals and timeouts of a client, in seconds."""

    beat_s: float
    """Interval between heartbeats, unless the coordinator asks for another (R42)."""
    ping_s: float
    """Interval between pings. A connection without an answer to one is closed."""
    retry_s: float
    """Delay before another attempt to connect. It doubles with each one."""
    retry_max_s: float
    """Upper bound on the delay between attempts to connect."""


@dataclass(frozen=True, slots=True)
class _Letter:
    """A message in the outbox."""

    message: msgspec.Struct
    kept: bool
    """True if the message outlives the connection."""


class ControlClient(Generic[Order]):
    """Connection of an agent to the coordinator of its job.

    It lives on one event loop, which also makes all callbacks. `Order` is the type of the
    coordinator's messages.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        path: str,
        token: Callable[[], str],
        *,
        pace: ControlTiming,
        greet: Callable[[], Awaitable[msgspec.Struct]],
        beat: Callable[[], msgspec.Struct],
        figures: Callable[[], Iterable[msgspec.Struct]],
        decode: Callable[[str], Order | BeatEvery],
        obey: Callable[[Order | BeatEvery], None],
        ended: Callable[[], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare a client; `run` connects it.

        Args:
            urls: Addresses of the coordinator, tried in turn.
            path: Path of the web socket.
            token: Returns the token; called before each connection, since it may be rotated.
            pace: Intervals and timeouts.
            greet: Returns the first message of each connection, which holds all facts.
            beat: Returns a heartbeat.
            figures: Returns the figures. They go with every n-th heartbeat; the coordinator chooses
                n.
            decode: Decodes a message of the coordinator; raises WireError if it is malformed.
            obey: Called with each message of the coordinator.
            ended: Called after each attempt to connect, even one that came to no greeting.
            tls: TLS settings; None for plain HTTP.
        """
        self._urls = deque(urls)
        self._path = path
        self._token = token
        self._pace = pace
        self._greet, self._beat, self._decode, self._obey = greet, beat, decode, obey
        self._figures, self._ended = figures, ended
        self._tls = tls
        self._outbox: deque[_Letter] = deque()
        self._news = asyncio.Event()
        self._full = asyncio.Event()
        self._open_s = dict.fromkeys(urls, OPEN_S)
        self._rhythm = BeatEvery(int(1000 * pace.beat_s), 1)
        self._due_s = 0.0
        self._beats = 0
        self._leaving = False
        self._last: msgspec.Struct | None = None
        self._farewell = False
        """True once everything was sent over this connection, which is being closed."""
        self._complaint = ""
        self.left = asyncio.Event()
        """Set when the coordinator has read everything up to the last message of `leave`."""
        self.connected = False
        self.connections = 0

    def send(self, message: msgspec.Struct) -> None:
        """Send a message now, or with the next connection if there is none.

        Args:
            message: The message. It is kept until it was sent.
        """
        self._post(_Letter(message, kept=True))

    def pass_on(self, message: msgspec.Struct) -> None:
        """Send a message over this connection, or the one that is being opened.

        Args:
            message: The message. It is lost with that connection.
        """
        self._post(_Letter(message, kept=False))

    def _post(self, letter: _Letter) -> None:
        self._outbox.append(letter)
        self._news.set()
        if len(self._outbox) > OUTBOX_MAX:
            self._full.set()

    def leave(self, last: msgspec.Struct | None = None) -> None:
        """Send everything that is queued, then a last message, and end `run`.

        Args:
            last: The last message; None if there is none.
        """
        self._leaving, self._last = True, last
        self._news.set()

    async def run(self) -> None:
        """Keep a connection until the coordinator has read the last message of `leave`."""
        delay_s = self._pace.retry_s
        calls = aiohttp.TCPConnector(socket_factory=_socket)
        async with aiohttp.ClientSession(connector=calls) as session:
            while True:
                url, before, fault = self._urls[0], self.connections, None
                try:
                    await self._connect(session, url)
                    why = "the connection to the coordinator ended"
                except TimeoutError:
                    why = f"no answer from the coordinator at {url} within {self._open_s[url]:g} s"
                    self._open_s[url] = min(2 * self._open_s[url], OPEN_MAX_S)
                except (aiohttp.ClientError, OSError) as error:
                    why = _reason(url, error)
                except Exception as error:
                    why = f"the connection to the coordinator was given up after {error!r}"
                    fault = error
                finally:
                    self.connected = False
                    self._outbox = deque(letter for letter in self._outbox if letter.kept)
                    self._full.clear()
                    self._ended()
                if self.left.is_set():
                    return
                self._complain(why, fault)
                self._urls.rotate(-1)
                if self.connections > before and fault is None:
                    delay_s, self._open_s[url] = self._pace.retry_s, OPEN_S
                # Add jitter, so that the pods of a job do not all reconnect at the same moment.
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, self._pace.retry_max_s)

    async def _connect(self, session: aiohttp.ClientSession, url: str) -> None:
        opening = session.ws_connect(
            f"{url}{self._path}",
            headers={"Authorization": f"Bearer {self._token()}"},
            heartbeat=self._pace.ping_s,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            ssl=self._tls if self._tls is not None else True,
        )
        async with asyncio.timeout(self._open_s[url]):
            opened = await opening
        async with opened as line:
            self._farewell = False
            self._rhythm = BeatEvery(int(1000 * self._pace.beat_s), 1)
            self._due_s = asyncio.get_running_loop().time() + self._pace.beat_s
            await line.send_str(wire.to_json(await self._greet()))
            self.connected, self._complaint = True, ""
            self.connections += 1
            log.info("connected to the coordinator at %s", url)
            await self._exchange(line)

    async def _exchange(self, line: aiohttp.ClientWebSocketResponse) -> None:
        """Read and write until one of the two ends. An exception of either is raised again."""
        tasks = (
            asyncio.create_task(self._read(line)),
            asyncio.create_task(self._write(line)),
            asyncio.create_task(self._choke()),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._farewell:
                await asyncio.wait(tasks[:2], timeout=CLOSE_S)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        if self._farewell and line.close_code not in (None, aiohttp.WSCloseCode.ABNORMAL_CLOSURE):
            # The coordinator answered the close frame, so it has read all messages before that.
            self.left.set()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _choke(self) -> None:
        """End the connection when too many messages are unsent."""
        await self._full.wait()
        log.warning("the coordinator leaves more than %d messages unread", OUTBOX_MAX)

    async def _read(self, line: aiohttp.ClientWebSocketResponse) -> None:
        async for message in line:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            try:
                order = self._decode(message.data)
            except wire.WireError as error:
                log.warning("the coordinator sent something that is not a message: %s", error)
                continue
            if isinstance(order, BeatEvery):
                self._beat_every(order)
            self._obey(order)

    def _beat_every(self, rhythm: BeatEvery) -> None:
        """Change the heartbeat interval.

        Thousands of agents get this message at the same moment, so the next heartbeats are spread
        over the interval at random.
        """
        self._rhythm = rhythm
        interval_s = rhythm.ms / 1000
        self._due_s = asyncio.get_running_loop().time() + random.uniform(0, interval_s)
        self._beats = random.randrange(rhythm.figures)
        self._news.set()

    async def _write(self, line: aiohttp.ClientWebSocketResponse) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._outbox:
                await line.send_str(wire.to_json(self._outbox[0].message))
                self._outbox.popleft()
            if self._leaving:
                if self._last is not None:
                    await line.send_str(wire.to_json(self._last))
                self._farewell = True
                await line.close()
                return
            self._news.clear()
            try:
                async with asyncio.timeout_at(self._due_s):
                    await self._news.wait()
            except TimeoutError:
                await self._say_alive(line)
                self._due_s = loop.time() + self._rhythm.ms / 1000

    async def _say_alive(self, line: aiohttp.ClientWebSocketResponse) -> None:
        try:
            messages = [wire.to_json(self._beat())]
            if self._beats % self._rhythm.figures == 0:
                messages.extend(wire.to_json(figures) for figures in self._figures())
        except Exception as error:
            # The callback reads what other threads change, so the next heartbeat may succeed.
            self._complain(f"a heartbeat could not be made: {error!r}", error)
            return
        self._beats += 1
        for text in messages:
            await line.send_str(text)

    def _complain(self, text: str, fault: Exception | None = None) -> None:
        """Log a problem once per reason, since a coordinator may be away for long."""
        if text != self._complaint:
            log.warning("%s; trying again", text, exc_info=fault)
            self._complaint = text


def _socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, CALLS)
    return made


def _reason(url: str, error: BaseException) -> str:
    if isinstance(error, aiohttp.WSServerHandshakeError):
        if error.status in (401, 403):
            return f"the coordinator at {url} refuses the token: it belongs to another job"
        return f"{url} answers {error.status}, which no coordinator does"
    return f"no coordinator at {url}: {error}"
