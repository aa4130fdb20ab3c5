"""The operator's connections to coordinators: what they cost, and what a hostile one may do to it.

Against real servers on the loopback: a coordinator runs in a tenant's pod, and says what it likes.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from fake_cluster.beside import server_context
from fake_cluster.parts import job_body
from paceline_operator.cluster.coordinator import Links
from paceline_operator.cluster.store import Key
from paceline_operator.cluster.tls import pair_of, pinned
from paceline_operator.core.coordinator_status import CoordinatorStatus
from paceline_operator.core.job import Job, read_job
from paceline_operator.core.keys import job_keys

KEYS = job_keys(bytes(32), "a")
MANY = 40
TLS_BYTES_MAX = 96 * 1024
"""Of both ends of one connection, as Python counts; asyncio's own buffers alone are 512 KiB."""


def job(name: str = "digits", replicas: int = 2) -> Job:
    body = job_body(name=name, replicas=replicas)
    body["metadata"] |= {"uid": "a", "namespace": "default", "generation": 1}
    return read_job(body)


@dataclass
class Heard:
    """What the links tell the operator."""

    statuses: list[CoordinatorStatus] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, _: Key, status: CoordinatorStatus | None) -> None:
        if status is not None:
            self.statuses.append(status)
            self.news.set()


@asynccontextmanager
async def links(heard: Heard) -> AsyncIterator[Links]:
    async with Links(
        secrets_of=lambda _: (KEYS.token, pinned(pair_of(KEYS).certificate)),
        heard=heard,
        arrived=lambda *_: None,
        clock=asyncio.get_running_loop().time,
        leads=lambda: True,
    ) as made:
        yield made


@asynccontextmanager
async def coordinator(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """The URL of a coordinator with the job's own certificate."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(KEYS)).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_a_connection_costs_little_memory() -> None:
    async def scenario() -> float:
        heard = Heard()

        async def answer(request: web.Request) -> web.Response:
            if "after" in request.query:
                await asyncio.sleep(60)
            return web.json_response({"seq": 1})

        async with coordinator(answer) as url, links(heard) as made:
            gc.collect()
            tracemalloc.start()
            for number in range(MANY):
                made.follow(("default", f"j{number}"), job(), url, hurry=True)
            async with asyncio.timeout(20):
                while len(heard.statuses) < MANY:
                    heard.news.clear()
                    await heard.news.wait()
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return held / MANY

    assert asyncio.run(scenario()) < TLS_BYTES_MAX
