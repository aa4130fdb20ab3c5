"""A pod's connection to the coordinator survives failures at either end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType, web
from paceline.control import client as control
from paceline.control.voice import INTRODUCTIONS_S, PodVoice
from paceline.core import wire
from paceline.core.agent.relay import Relay
from paceline.core.messages import (
    AgentDone,
    AgentHello,
    BeatEvery,
    Dismiss,
    Endpoints,
    Heartbeat,
    Introduce,
    PodBeat,
    RankDead,
    RankEnvelope,
    RankFigures,
    RankGone,
    Register,
    Shutdown,
    Stopped,
    ToPod,
)
from paceline.refusals import PROCESS, Entry, RefusalReason
from paceline_api.ids import NO_GENERATION, MemberId

from testing.failing import Failing

WAIT_S = 30.0
TOKEN = "secret"
ME, OTHER = MemberId(0, 0, 1000), MemberId(0, 1, 1000)
HELLO = AgentHello(0, 1, "h", "", (), ())
BEAT = PodBeat(0, 1, carriers=())
AGAIN = PodBeat(0, 1)
"""A heartbeat without changes."""
FIGURES = RankFigures(ME, 0, {"epoch": 1.0})
ORDER = Shutdown("over")
DEAD = RankDead(ME, -9, "killed", restarts=False)
STOPPED = Stopped(NO_GENERATION, ME, 3)
LAST = AgentDone(0, 1, "finished")


def register(who: MemberId) -> Register:
    ends = Endpoints("a", "b")
    return Register(who, 1, "h", ends, NO_GENERATION, NO_GENERATION, 0, False, ready=True)


class Coordinator:
    """A server that records each message with the number of its connection."""

    def __init__(self) -> None:
        self.connections: list[web.WebSocketResponse] = []
        self.messages: asyncio.Queue[tuple[int, msgspec.Struct]] = asyncio.Queue()
        self.url = ""
        self.deaf = 0
        """Number of connection attempts that get no answer."""

    async def tell(self, text: str) -> None:
        await self.connections[-1].send_str(text)

    async def wait(self, message: msgspec.Struct) -> int:
        """Wait for `message` and return the number of its connection, starting at 1."""
        async with asyncio.timeout(WAIT_S):
            while True:
                number, received = await self.messages.get()
                if received == message:
                    return number

    async def wait_for(self, kind: type) -> Any:
        async with asyncio.timeout(WAIT_S):
            while True:
                _, received = await self.messages.get()
                if isinstance(received, kind):
                    return received

    async def next(self) -> msgspec.Struct:
        async with asyncio.timeout(WAIT_S):
            return (await self.messages.get())[1]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        while self.deaf:
            self.deaf -= 1
            await asyncio.sleep(WAIT_S)
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        self.connections.append(connection)
        number = len(self.connections)
        async for message in connection:
            if message.type is WSMsgType.TEXT:
                self.messages.put_nowait((number, wire.message_of_pod(message.data)))
        return connection


@asynccontextmanager
async def coordinator() -> AsyncIterator[Coordinator]:
    mine = Coordinator()
    app = web.Application()
    app.add_routes([web.get("/v1/agents", mine.serve)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    mine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield mine
    finally:
        await runner.cleanup()


@dataclass
class Pod(Failing):
    """The callbacks of a pod, each of which fails as often as it is configured to.

    Its ranks answer at once, except those in `stopped`.
    """

    obeyed: list[Any] = field(default_factory=list)
    orders: list[tuple[MemberId, Any]] = field(default_factory=list)
    stopped: set[MemberId] = field(default_factory=set)
    numbers: dict[MemberId, int] = field(default_factory=dict)
    voice: PodVoice = field(init=False)

    def hello(self, registers: tuple[Register, ...]) -> AgentHello:
        self.may_fail("greet")
        return msgspec.structs.replace(HELLO, registers=registers)

    def carriers(self) -> tuple[()]:
        self.may_fail("beat")
        return ()

    def obey(self, order: Any) -> None:
        self.may_fail("obey")
        self.obeyed.append(order)

    def tell(self, member: MemberId, data: bytes) -> None:
        order = wire.message_to_rank(data)
        self.orders.append((member, order))
        if isinstance(order, Introduce):
            self.numbers[member] = order.connection
            if member not in self.stopped:
                self.say(register(member))

    def say(self, message: Any) -> None:
        envelope = RankEnvelope(self.numbers[message.member], message)
        self.voice.receive(message.member, msgspec.json.encode(envelope))


def voice_of(pod: Pod, *urls: str, token: str = TOKEN) -> PodVoice:
    return PodVoice(
        urls,
        lambda: token,
        Relay(0, 1),
        hello=pod.hello,
        carriers=pod.carriers,
        obey=pod.obey,
        tell=pod.tell,
    )


@asynccontextmanager
async def speaking(pod: Pod, *urls: str, token: str = TOKEN) -> AsyncIterator[PodVoice]:
    pod.voice = voice_of(pod, *urls, token=token)
    running = asyncio.create_task(pod.voice.run())
    try:
        yield pod.voice
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_a_cancellation_that_coincides_with_a_failure_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancellation must end the client even if the connection fails at the same moment.

    `asyncio.wait_for` of Python 3.11 swallows such a cancellation, and whoever awaits the client
    would wait forever.
    """

    async def scenario() -> None:
        async def fail(*_: object, **__: object) -> None:
            running.cancel()
            raise aiohttp.ClientError("refused")

        monkeypatch.setattr(aiohttp.ClientSession, "ws_connect", fail)
        running = asyncio.create_task(voice_of(Pod(), "http://127.0.0.1:1").run())
        await asyncio.wait([running], timeout=WAIT_S)
        assert running.cancelled()

    asyncio.run(scenario())


@pytest.mark.long
def test_an_unknown_message_of_the_coordinator_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        pod = Pod()
        async with coordinator() as mine, speaking(pod, mine.url):
            await mine.wait(HELLO)
            await mine.tell('{"type": "news from a later release"}')
            await mine.tell(wire.to_json(ORDER))
            # This heartbeat follows once the order has been read.
            assert await mine.wait(AGAIN) == 1
            assert pod.obeyed == [ORDER]

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "the coordinator sent something that is not a message" in caplog.text


@pytest.mark.long
def test_heartbeats_and_metrics_follow_the_interval_of_the_coordinator() -> None:
    """A new connection starts with the default interval of a small job (R42)."""

    async def scenario() -> None:
        pod = Pod()
        async with coordinator() as mine, speaking(pod, mine.url) as voice:
            await mine.wait(HELLO)
            voice.open(ME)
            assert await mine.wait(register(ME)) == 1
            pod.say(FIGURES)
            assert [await mine.next() for _ in range(2)] == [BEAT, FIGURES]
            rhythm = BeatEvery(ms=20, figures=3)
            await mine.tell(wire.to_json(rhythm))
            await mine.wait(AGAIN)
            assert pod.orders[-1] == (ME, rhythm), "the ranks make no more figures than are wanted"
            voice.open(OTHER)
            assert pod.orders[-1] == (OTHER, rhythm)
            await mine.wait(register(OTHER))
            counts = []
            for _ in range(2):
                pod.say(FIGURES)
                beats = 0
                while await mine.next() != FIGURES:
                    beats += 1
                counts.append(beats)
            assert counts[1] == 3
            await mine.tell(wire.to_json(BeatEvery(ms=3_600_000, figures=1)))
            await mine.connections[-1].close()
            assert await mine.wait(BEAT) == 2

    asyncio.run(scenario())


@pytest.mark.long
def test_a_heartbeat_that_cannot_be_built_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with coordinator() as mine, speaking(Pod({"beat": 2}), mine.url):
            assert await mine.wait(BEAT) == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("a heartbeat could not be made: RuntimeError") == 1


@pytest.mark.long
@pytest.mark.parametrize("what", ["greet", "obey"])
def test_a_failing_callback_only_costs_the_connection(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with coordinator() as mine, speaking(Pod({what: 1}), mine.url):
            if what == "obey":
                await mine.wait(HELLO)
                await mine.tell(wire.to_json(ORDER))
            assert await mine.wait(BEAT) == 2

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "the connection to the coordinator was given up after RuntimeError" in caplog.text


@contextmanager
def closed_port() -> Iterator[str]:
    """Yield a URL that refuses connections; the port is bound, so nobody else can listen on it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.long
def test_addresses_are_tried_in_turn_and_failures_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        with closed_port() as nobody:
            async with coordinator() as mine, speaking(Pod(), nobody, nobody, mine.url):
                assert await mine.wait(BEAT) == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("no coordinator at http://127.0.0.1:") == 1


def test_a_refused_token_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with coordinator() as mine, speaking(Pod(), mine.url, token="other"):
            async with asyncio.timeout(WAIT_S):
                while "refuses the token" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                    await asyncio.sleep(0.02)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("refuses the token: it belongs to another job") == 1


@pytest.mark.long
def test_the_connection_timeout_grows_with_each_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each abandoned attempt costs a busy coordinator another handshake."""
    monkeypatch.setattr(control, "OPEN_S", 0.1)

    async def scenario() -> None:
        async with coordinator() as mine:
            mine.deaf = 2
            async with speaking(Pod(), mine.url):
                assert await mine.wait(BEAT) == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    given = [record.message for record in caplog.records if "no answer" in record.message]
    assert [text.split(" within ")[1].split(";")[0] for text in given] == ["0.1 s", "0.2 s"]


def test_finish_returns_once_the_coordinator_has_read_the_final_message() -> None:
    async def scenario() -> None:
        async with coordinator() as mine, speaking(Pod(), mine.url) as voice:
            assert await voice.finish(LAST)
            assert await mine.wait(LAST) == 1

    asyncio.run(scenario())


# ---- relaying for ranks (R43) --------------------------------------------------------------------


@pytest.mark.long
def test_a_new_connection_resends_evidence_and_drops_messages_of_ranks() -> None:
    """Evidence of a death is kept, since only the agent has it.

    Messages of ranks are dropped: the state machine of a rank repeats what still matters.
    """

    async def scenario() -> None:
        with closed_port() as nobody:
            async with coordinator() as mine, speaking(Pod(), nobody, mine.url) as voice:
                voice.send(DEAD)
                voice._client.pass_on(STOPPED)
                assert [await mine.next() for _ in range(3)] == [HELLO, DEAD, BEAT]

    asyncio.run(scenario())


@pytest.mark.long
def test_a_new_connection_registers_all_responsive_ranks_in_one_hello() -> None:
    async def scenario() -> None:
        pod = Pod()
        async with coordinator() as mine, speaking(pod, mine.url) as voice:
            await mine.wait(HELLO)
            for who in (ME, OTHER):
                voice.open(who)
                await mine.wait(register(who))
            both = msgspec.structs.replace(HELLO, registers=(register(ME), register(OTHER)))
            await mine.connections[-1].close()
            assert await mine.wait(both) == 2
            pod.stopped.add(OTHER)
            begun_s = asyncio.get_running_loop().time()
            await mine.connections[-1].close()
            one = msgspec.structs.replace(HELLO, registers=(register(ME),))
            assert await mine.wait(one) == 3
            assert asyncio.get_running_loop().time() - begun_s >= INTRODUCTIONS_S
            pod.say(register(OTHER))
            assert await mine.wait(register(OTHER)) == 3

    asyncio.run(scenario())


@pytest.mark.long
def test_multicast_orders_reach_each_rank_and_stale_messages_are_dropped() -> None:
    async def scenario() -> None:
        pod = Pod()
        async with coordinator() as mine, speaking(pod, mine.url) as voice:
            await mine.wait(HELLO)
            for who in (ME, OTHER):
                voice.open(who)
                await mine.wait(register(who))
            order = Dismiss("over")
            packed = msgspec.Raw(msgspec.json.encode(order))
            await mine.tell(wire.to_json(ToPod((ME, OTHER), packed)))
            await mine.tell(wire.to_json(ORDER))
            while not pod.obeyed:
                await mine.wait_for(PodBeat)
            assert pod.orders[-2:] == [(ME, order), (OTHER, order)]
            voice.receive(ME, msgspec.json.encode(RankEnvelope(pod.numbers[ME] + 99, STOPPED)))
            pod.say(Heartbeat(ME, NO_GENERATION, NO_GENERATION, 0))
            beat = await mine.wait_for(PodBeat)
            while not beat.heard:
                beat = await mine.wait_for(PodBeat)
            assert beat.heard == ((0, 1000),)
            voice.close(ME)
            assert await mine.next() == RankGone(ME), "the stale word was not passed on"

    asyncio.run(scenario())


def test_malformed_and_impersonating_messages_of_ranks_are_dropped() -> None:
    async def scenario() -> None:
        pod = Pod()
        async with coordinator() as mine, speaking(pod, mine.url) as voice:
            await mine.wait(HELLO)
            voice.open(ME)
            await mine.wait(register(ME))
            voice.receive(ME, b"nonsense")
            voice.receive(ME, msgspec.json.encode(RankEnvelope(pod.numbers[ME], register(OTHER))))
            assert isinstance(await mine.next(), PodBeat)

    refused = (Entry.RANK_PIPE, RefusalReason.MALFORMED)
    before = PROCESS.counts().get(refused, 0)
    asyncio.run(scenario())
    assert PROCESS.counts()[refused] == before + 2


def test_a_coordinator_that_stops_reading_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "OUTBOX_MAX", 8)

    async def scenario() -> None:
        pod = Pod()
        async with coordinator() as mine, speaking(pod, mine.url) as voice:
            await mine.wait(HELLO)
            voice.open(ME)
            await mine.wait(register(ME))
            for _ in range(9):
                pod.say(STOPPED)
            again = msgspec.structs.replace(HELLO, registers=(register(ME),))
            assert await mine.wait(again) == 2

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "the coordinator leaves more than 8 messages unread" in caplog.text
