"""The coordinator's HTTP server under attack.

Each refusal is counted and its log line is rate-limited; well-behaved clients are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest
from paceline.control import front
from paceline.coordinator import server
from paceline.core.admission import Bounds
from paceline.refusals import Entry, RefusalReason

from tests.coordinator.served import OPERATOR_TOKEN, TOKEN, Served, greeting, served
from tests.coordinator.test_server import RANK, until_closed

TIMEOUT_S = 60.0
MANY = 200
REQUEST = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n"
UPGRADE = (
    b"GET /v1/agents HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


async def connect(at: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = at.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def answer_to(at: Served, sent: bytes) -> bytes:
    """Return the head of the answer, or nothing if the server closes the connection first."""
    reader, writer = await connect(at)
    try:
        writer.write(sent)
        await writer.drain()
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    finally:
        writer.close()


def refused(at: Served, reason: RefusalReason) -> int:
    return at.refusals.counts().get((Entry.COORDINATOR, reason), 0)


async def count_reaches(at: Served, reason: RefusalReason, number: int) -> None:
    while refused(at, reason) < number:  # noqa: ASYNC110  counts have no event
        await asyncio.sleep(0.01)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "token",
    [
        b"\xff\xfe",
        b"Bearer \xc3\x28",
        b"Bearer " + bytes(range(128, 256)),
        b"Bearer " + TOKEN.encode() + b"\xff",
        "Bearer ü".encode("latin-1"),
        b"\xed\xa0\x80",
    ],
)
@pytest.mark.parametrize("path", [b"/v1/status", b"/v1/agents", b"/metrics", b"/nothing"])
def test_an_authorization_header_that_is_not_utf8_gives_401(
    token: bytes, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with served() as at:
            head = b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nAuthorization: "
            for _ in range(3):
                got = await answer_to(at, head + token + b"\r\n\r\n")
                assert got.startswith(b"HTTP/1.1 401"), got
            assert refused(at, RefusalReason.UNAUTHENTICATED) == 3

    run(go())
    assert len(lines(caplog)) == 1
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), RefusalReason.MALFORMED),
        (b"GET\r\n\r\n", RefusalReason.MALFORMED),
        (b"\x00" * 1000 + b"\r\n\r\n", RefusalReason.MALFORMED),
        (b"NONSENSE / HTTP/9.9\r\n\r\n", RefusalReason.MALFORMED),
        (REQUEST + b"bad header\x00: x\r\n\r\n", RefusalReason.MALFORMED),
        (REQUEST + b"Content-Length: -5\r\n\r\n", RefusalReason.MALFORMED),
        (
            REQUEST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            RefusalReason.MALFORMED,
        ),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", RefusalReason.TOO_LARGE),
        (REQUEST + b"X: " + b"a" * 100_000 + b"\r\n\r\n", RefusalReason.TOO_LARGE),
        (REQUEST + b"X" * 100_000 + b": a\r\n\r\n", RefusalReason.TOO_LARGE),
        (REQUEST + b"X: y\r\n" * 5_000 + b"\r\n", RefusalReason.MALFORMED),
    ],
)
def test_a_flood_of_malformed_requests_is_counted_and_logged_once(
    sent: bytes, reason: RefusalReason, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with served() as at:
            for _ in range(20):
                assert not (await answer_to(at, sent)).startswith(b"HTTP/1.1 2")
            await count_reaches(at, reason, 20)
            await at.status()

    run(go())
    (line,) = lines(caplog)
    assert "refused a message of 127.0.0.1" in line
    assert len(line) < 200
    assert "Traceback" not in caplog.text


@pytest.mark.long
def test_an_incomplete_request_times_out_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow trickles of bytes and a second request on the same connection time out too."""
    monkeypatch.setattr(front, "HEADER_S", 0.5)

    async def drip(at: Served, first: bytes) -> None:
        reader, writer = await connect(at)
        writer.write(first)
        while True:
            try:
                writer.write(b"X: y\r\n")
                await writer.drain()
                async with asyncio.timeout(0.1):
                    if not await reader.read(1000):
                        break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        writer.close()

    async def go() -> None:
        async with served() as at:
            whole = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
            firsts = (REQUEST, b"POST /v1/targets HTTP/1.1\r\n", whole + REQUEST)
            await asyncio.gather(*(drip(at, first) for first in firsts))
            await count_reaches(at, RefusalReason.TOO_SLOW, 3)

    run(go())


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "HEADER_S", 0.2)

    async def go() -> None:
        async with served() as at:
            assert not await answer_to(at, b"")
            assert refused(at, RefusalReason.TOO_SLOW) == 1

    run(go())


@pytest.mark.long
def test_an_incomplete_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.2)

    async def go() -> None:
        async with served() as at:
            head = f"POST /v1/targets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OPERATOR_TOKEN}"
            sent = head.encode() + b"\r\nContent-Length: 100\r\n\r\n{"
            assert (await answer_to(at, sent)).startswith(b"HTTP/1.1 408")
            assert refused(at, RefusalReason.TOO_SLOW) == 1

    run(go())


def test_a_deeply_nested_body_is_refused() -> None:
    async def go() -> None:
        async with served() as at:
            for path in ("/v1/targets", "/v1/inventory"):
                body = b'{"x":' + b"[" * 100_000
                async with at.http.post(path, data=body) as response:
                    assert response.status == 400
            assert (await at.status()).replicas == 2

    run(go())


@pytest.mark.parametrize("words", ["[" * 100_000, '{"type":"PodBeat","x":' + "[" * 100_000, "5"])
def test_an_undecodable_message_only_closes_its_own_connection(
    words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with served() as at:
            honest = await at.socket(greeting(RANK))
            for _ in range(5):
                hostile = await at.bare_socket()
                await hostile.send_str(words)
                await until_closed(hostile)
            await count_reaches(at, RefusalReason.MALFORMED, 5)
            assert [rank.member for rank in (await at.status()).ranks] == [RANK]
            await honest.close()

    run(go())
    assert len(lines(caplog)) == 1


def test_one_address_cannot_exhaust_the_connections() -> None:
    """Clients of one address share a limit; connections with a valid token are kept."""

    async def go() -> None:
        async with served(bounds=Bounds(connections=20, of_one_address=8)) as at:
            agent = await at.socket(greeting(RANK))
            await at.status(after="0", timeout="5s")
            port = int(at.url.rpartition(":")[2])
            held = [socket.create_connection(("127.0.0.1", port)) for _ in range(MANY)]
            await count_reaches(at, RefusalReason.TOO_MANY, MANY - 8)
            # Other loopback addresses count as other clients.
            for number in range(2, 30):
                other = socket.create_connection(
                    ("127.0.0.1", port), source_address=(f"127.0.0.{number}", 0)
                )
                held.append(other)
            calling = aiohttp.TCPConnector(local_addr=("127.0.0.99", 0))
            async with (
                aiohttp.ClientSession(at.url, connector=calling) as one,
                one.get("/healthz") as response,
            ):
                assert response.status == 200
            assert [rank.member for rank in (await at.status()).ranks] == [RANK]
            assert not agent.closed
            for connection in held:
                connection.close()

    run(go())


@pytest.mark.long
def test_a_client_that_does_not_read_its_answers_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The requests have no token; their answers fill all buffers."""
    monkeypatch.setattr(front, "UNREAD_S", 0.3)

    async def go() -> None:
        async with served() as at:
            _, writer = await connect(at)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            try:
                while True:
                    writer.write((REQUEST + b"\r\n") * 1000)
                    async with asyncio.timeout(10):
                        await writer.drain()
            except (ConnectionError, TimeoutError):
                pass
            await count_reaches(at, RefusalReason.TOO_SLOW, 1)
            writer.transport.abort()

    run(go())
