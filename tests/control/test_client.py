"""A client's connection to the coordinator outlives what goes wrong at either end of it.

The same for both clients: a rank, which has a thread for it, and an agent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiohttp import WSMsgType, web
from paceline.agent.coordinator_client import PACE
from paceline.agent.coordinator_client import CoordinatorLink as AgentLink
from paceline.control.client import ControlClient
from paceline.core import wire
from paceline.core.messages import (
    AgentBeat,
    AgentDone,
    AgentHello,
    BeatEvery,
    Dismiss,
    Endpoints,
    Figures,
    Heartbeat,
    Register,
    Shutdown,
)
from paceline.core.protocol.ids import NO_GENERATION, MemberId
from paceline.worker.coordinator_client import CoordinatorLink as RankLink

WAIT_S = 30.0
TOKEN = "secret"
ME = MemberId(0, 0, 1000)
GREETINGS: dict[str, msgspec.Struct] = {
    "rank": Register(
        ME, 1, "h", Endpoints("a", "b"), NO_GENERATION, NO_GENERATION, 0, False, ready=True
    ),
    "agent": AgentHello(0, 1, "h", "", (), ()),
}
BEATS: dict[str, msgspec.Struct] = {
    "rank": Heartbeat(ME, NO_GENERATION, NO_GENERATION, 0),
    "agent": AgentBeat(0, 1),
}
FIGURES = Figures(ME, 0, {"epoch": 1.0})
ORDERS: dict[str, msgspec.Struct] = {"rank": Dismiss("over"), "agent": Shutdown("over")}
LAST = AgentDone(0, 1, "finished")
both = pytest.mark.parametrize("side", ["rank", "agent"])


class Coordinator:
    """Takes connections, one at a time, and tells what comes over which of them."""

    def __init__(self) -> None:
        self.connections: list[web.WebSocketResponse] = []
        self.heard: asyncio.Queue[tuple[int, msgspec.Struct]] = asyncio.Queue()
        self.url = ""

    async def tell(self, text: str) -> None:
        await self.connections[-1].send_str(text)

    async def wait(self, message: msgspec.Struct) -> int:
        """The number of the connection over which it comes, from 1."""
        async with asyncio.timeout(WAIT_S):
            while True:
                number, found = await self.heard.get()
                if found == message:
                    return number

    async def next(self) -> msgspec.Struct:
        async with asyncio.timeout(WAIT_S):
            return (await self.heard.get())[1]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        decode = wire.rank_message if request.path == "/v1/ranks" else wire.agent_message
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        self.connections.append(connection)
        number = len(self.connections)
        async for message in connection:
            if message.type is WSMsgType.TEXT:
                self.heard.put_nowait((number, decode(message.data)))
        return connection


@asynccontextmanager
async def coordinator() -> AsyncIterator[Coordinator]:
    mine = Coordinator()
    app = web.Application()
    app.add_routes([web.get("/v1/ranks", mine.serve), web.get("/v1/agents", mine.serve)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    mine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield mine
    finally:
        await runner.cleanup()


@dataclass
class Calls:
    """What a client is given to call; each fails as often as it is told."""

    side: str
    failures: dict[str, int] = field(default_factory=dict)
    obeyed: list[Any] = field(default_factory=list)

    def greet(self) -> Any:
        self._may_fail("greet")
        return GREETINGS[self.side]

    def beat(self) -> Any:
        self._may_fail("beat")
        return BEATS[self.side]

    def obey(self, order: Any) -> None:
        self._may_fail("obey")
        self.obeyed.append(order)

    def connected(self) -> None:
        self._may_fail("connected")

    def _may_fail(self, what: str) -> None:
        left = self.failures.get(what, 0)
        if left:
            self.failures[what] = left - 1
            raise RuntimeError("dictionary changed size during iteration")


@asynccontextmanager
async def linked(
    calls: Calls, *urls: str, token: str = TOKEN
) -> AsyncIterator[Callable[[msgspec.Struct], None]]:
    """What sends a message."""
    if calls.side == "rank":
        rank = RankLink(
            urls,
            token,
            register=calls.greet,
            heartbeat=calls.beat,
            figures=lambda: FIGURES,
            obey=calls.obey,
            connected=calls.connected,
        )
        rank.start()
        try:
            yield rank.send
        finally:
            await asyncio.to_thread(rank.close)
            assert not rank._thread.is_alive()
    else:
        agent = AgentLink(urls, token, hello=calls.greet, beat=calls.beat, obey=calls.obey)
        running = asyncio.create_task(agent.run())
        try:
            yield agent.send
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@both
def test_what_is_no_message_is_skipped(side: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        calls = Calls(side)
        async with coordinator() as mine, linked(calls, mine.url):
            await mine.wait(GREETINGS[side])
            await mine.tell('{"type": "news from a later release"}')
            await mine.tell(wire.to_json(ORDERS[side]))
            # A beat that comes after the order has been read.
            for _ in range(2):
                assert await mine.wait(BEATS[side]) == 1
            assert calls.obeyed == [ORDERS[side]]

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "the coordinator sent something that is no message" in caplog.text


def test_beats_and_figures_come_as_often_as_the_coordinator_wants() -> None:
    """R42; over the next connection they are those of a small job until it says so again."""

    async def scenario() -> None:
        async with coordinator() as mine, linked(Calls("rank"), mine.url):
            assert [await mine.next() for _ in range(3)] == [
                GREETINGS["rank"],
                BEATS["rank"],
                FIGURES,
            ]
            await mine.tell(wire.to_json(BeatEvery(ms=20, figures=3)))
            await mine.wait(FIGURES)
            told = [await mine.next() for _ in range(8)]
            assert told == 2 * [*3 * [BEATS["rank"]], FIGURES]
            await mine.tell(wire.to_json(BeatEvery(ms=3_600_000, figures=1)))
            while not mine.heard.empty():
                await mine.next()
            await mine.connections[-1].close()
            assert await mine.wait(BEATS["rank"]) == 2

    asyncio.run(scenario())


@both
def test_a_heartbeat_that_cannot_be_made_is_left_out(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        calls = Calls(side, {"beat": 2})
        async with coordinator() as mine, linked(calls, mine.url):
            assert await mine.wait(BEATS[side]) == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("a heartbeat could not be made: RuntimeError") == 1


@pytest.mark.parametrize(
    ("side", "what"),
    [
        ("rank", "greet"),
        ("rank", "obey"),
        ("rank", "connected"),
        ("agent", "greet"),
        ("agent", "obey"),
    ],
)
def test_any_other_call_that_fails_costs_the_connection_only(
    side: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        calls = Calls(side, {what: 1})
        async with coordinator() as mine, linked(calls, mine.url):
            if what == "obey":
                await mine.wait(GREETINGS[side])
                await mine.tell(wire.to_json(ORDERS[side]))
            assert await mine.wait(BEATS[side]) == 2

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "the connection to the coordinator was given up after RuntimeError" in caplog.text


@both
def test_addresses_are_tried_in_turn_and_complained_about_once(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        async with coordinator() as mine:
            nobody = f"http://127.0.0.1:{port}"
            async with linked(Calls(side), nobody, nobody, mine.url):
                assert await mine.wait(BEATS[side]) == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("no coordinator at http://127.0.0.1:") == 1


@both
def test_a_wrong_token_is_named(side: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with coordinator() as mine, linked(Calls(side), mine.url, token="other"):
            async with asyncio.timeout(WAIT_S):
                while "refuses the token" not in caplog.text:  # noqa: ASYNC110 - a log wakes nobody
                    await asyncio.sleep(0.02)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("refuses the token: it belongs to another job") == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_said_to_nobody_is_kept_or_lost(keeps: bool) -> None:
    """Kept for an agent; a rank's state machine repeats what still matters on a new connection."""

    async def scenario() -> bool:
        calls = Calls("agent")
        async with coordinator() as mine:
            client = ControlClient(
                (mine.url,),
                "/v1/agents",
                TOKEN,
                pace=PACE,
                greet=calls.greet,
                beat=calls.beat,
                decode=wire.message_to_agent,
                obey=calls.obey,
                keeps=keeps,
            )
            client.send(LAST)
            running = asyncio.create_task(client.run())
            heard = [await mine.heard.get() for _ in range(2)]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert heard[0] == (1, GREETINGS["agent"])
            return heard[1] == (1, LAST)

    assert asyncio.run(scenario()) is keeps


def test_the_last_word_of_a_rank_is_heard() -> None:
    async def scenario() -> None:
        async with coordinator() as mine:
            async with linked(Calls("rank"), mine.url) as send:
                await mine.wait(BEATS["rank"])
                send(GREETINGS["rank"])
                send(BEATS["rank"])
            assert await mine.wait(GREETINGS["rank"]) == 1

    asyncio.run(scenario())


def test_a_rank_that_reaches_nobody_can_be_closed() -> None:
    async def scenario() -> None:
        async with linked(Calls("rank"), "http://127.0.0.1:1"):
            pass

    asyncio.run(scenario())


def test_an_agent_knows_that_its_last_word_was_read() -> None:
    async def scenario() -> None:
        async with coordinator() as mine:
            calls = Calls("agent")
            link = AgentLink(
                (mine.url,), TOKEN, hello=calls.greet, beat=calls.beat, obey=calls.obey
            )
            running = asyncio.create_task(link.run())
            assert await link.finish(LAST)
            await running
            assert await mine.wait(LAST) == 1

    asyncio.run(scenario())
