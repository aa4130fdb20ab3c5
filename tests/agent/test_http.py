"""The HTTP server of an agent: what it serves, and to which callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from paceline.agent import http, targets
from paceline.agent.http import HttpServer
from paceline.core.anatomy.samples import PodSamples
from paceline.core.anatomy.steps_token import STEPS_HEADER, steps_token
from paceline.local import steps
from paceline.refusals import Entry, RefusalReason, Refusals

TOKEN = "the-token-of-the-ranks"
TIMEOUT_S = 60.0
SAMPLES = PodSamples("job", 0, "here", ())


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


@asynccontextmanager
async def served(refusals: Refusals | None = None) -> AsyncIterator[int]:
    server = HttpServer(
        lambda _: b"figures",
        lambda: {"ranks": {}},
        lambda: msgspec.json.encode(SAMPLES),
        token=TOKEN,
        refusals=refusals or Refusals(),
    )
    try:
        yield await server.start("127.0.0.1", 0, search=False)
    finally:
        await server.stop()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {STEPS_HEADER: ""},
        {STEPS_HEADER: TOKEN},
        {STEPS_HEADER: steps_token(TOKEN) + "x"},
        {STEPS_HEADER: steps_token(TOKEN).upper()},
        {STEPS_HEADER: steps_token("of-another-job")},
        {STEPS_HEADER: "\udcff\udcfe"},
        {"Authorization": f"Bearer {steps_token(TOKEN)}"},
        {"Authorization": f"Bearer {TOKEN}"},
    ],
)
def test_steps_are_refused_without_the_token(headers: dict[str, str]) -> None:
    async def go() -> None:
        refusals = Refusals()
        async with served(refusals) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            asked = f"GET /steps HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}\r\n"
            writer.write(asked.encode("utf-8", "surrogateescape"))
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 403")
            assert b"here" not in answer
            assert refusals.counts() == {(Entry.AGENT_HTTP, RefusalReason.UNAUTHENTICATED): 1}

    run(go())


def test_steps_are_served_with_the_token() -> None:
    async def go() -> None:
        async with served() as port:
            url = f"http://127.0.0.1:{port}/steps"
            got = await asyncio.to_thread(steps.of_agent, url, steps_token(TOKEN))
            assert got == SAMPLES

    run(go())


def test_metrics_and_health_need_no_token() -> None:
    async def go() -> None:
        async with served() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as anybody:
            for path in ("/metrics", "/healthz"):
                async with anybody.get(path) as response:
                    assert response.status == 200

    run(go())


def test_many_connections_from_one_address_leave_room_for_other_addresses() -> None:
    async def go() -> None:
        refusals = Refusals()
        async with served(refusals) as port:
            held = [
                await asyncio.open_connection("127.0.0.1", port)
                for _ in range(3 * http.BOUNDS.connections)
            ]
            calling = aiohttp.TCPConnector(local_addr=("127.0.0.99", 0))
            async with (
                aiohttp.ClientSession(connector=calling) as prometheus,
                prometheus.get(f"http://127.0.0.1:{port}/metrics") as response,
            ):
                assert response.status == 200
            assert refusals.counts()[Entry.AGENT_HTTP, RefusalReason.TOO_MANY] > 0
            for _, writer in held:
                writer.close()

    run(go())


def test_the_token_file_of_a_local_run_is_readable_by_its_own_user_only(tmp_path: Path) -> None:
    for _ in range(2):  # as two agents of one run do
        targets.leave_token(tmp_path, TOKEN)
    (left,) = tmp_path.iterdir()
    assert left.stat().st_mode & 0o777 == 0o600
    assert left.read_text() == steps_token(TOKEN)


def test_the_steps_of_a_local_run_are_fetched_with_the_token_from_its_file(tmp_path: Path) -> None:
    async def go() -> None:
        async with served() as port:
            targets.leave_token(tmp_path, TOKEN)
            targets.publish(tmp_path, job="job", slot=0, attempt=0, address=f"127.0.0.1:{port}")
            pods, silent = await asyncio.to_thread(steps.of_run, tmp_path)
            assert (pods, silent) == ([SAMPLES], [])

    run(go())
