"""Liveness of the operator: each watch, including kopf's, by its last sign of life."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp import web
from paceline_api.access.access import Access
from paceline_api.access.login import Login
from paceline_operator.cluster.store import Store
from paceline_operator.handlers import JobsWatch, make_registry, make_settings
from paceline_operator.health import DEAD_S, Health
from paceline_operator.metrics import OperatorMetrics


class Desk:
    def __init__(self, server: str = "http://127.0.0.1:1") -> None:
        self.now_s = 1000.0
        self.access = Access(lambda: Login(server, authorization="Bearer secret"))
        self.jobs = JobsWatch(self.access, lambda: self.now_s)
        self.health = Health(Store(lambda _: None), OperatorMetrics(), lambda: 0, self.jobs)


def test_a_dead_watch_of_jobs_fails_liveness() -> None:
    desk = Desk()
    assert desk.health.alive() == ""
    desk.now_s += DEAD_S + 1
    assert "trainingjobs" in desk.health.alive()
    assert f'age_seconds{{kind="trainingjobs"}} {DEAD_S + 1}' in desk.health.page().decode()
    desk.jobs.note_event()
    assert desk.health.alive() == ""


def test_only_an_answered_watch_is_a_sign_of_life() -> None:
    async def scenario() -> None:
        async def answer(request: web.Request) -> web.Response:
            asked.append(request.headers.get("Authorization", ""))
            return web.json_response({}, status=int(request.query.get("code", "200")))

        asked: list[str] = []
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        desk = Desk(url)
        async with desk.jobs.session(desk.access.login) as session:
            for query, age_s in (("", 10.0), ("?watch=true&code=500", 10.0), ("?watch=true", 0.0)):
                desk.now_s += 10.0 - desk.jobs.age_s
                async with session.get(url + query) as response:
                    await response.read()
                assert desk.jobs.age_s == age_s, query
        await runner.cleanup()
        assert set(asked) == {"Bearer secret"}

    asyncio.run(scenario())


def test_the_server_ends_a_watch_of_jobs_well_before_it_counts_as_dead() -> None:
    """Each new watch is a sign of life, even if no job changes."""
    settings = make_settings()
    assert settings.watching.server_timeout is not None
    assert 2 * settings.watching.server_timeout < DEAD_S
    assert settings.watching.inactivity_timeout < DEAD_S


def test_kopf_keeps_no_copies_of_objects() -> None:
    """A copy would only serve to find out what has changed, which no handler asks for."""
    storage = make_settings().persistence.diffbase_storage
    assert storage.build(body={"spec": {}}, extra_fields=()) == {}  # type: ignore[arg-type]
    assert storage.fetch(body={"spec": {}}) is None  # type: ignore[arg-type]


def test_kopf_logs_in_with_a_session_of_the_operator() -> None:
    async def scenario() -> None:
        desk = Desk()
        registry = make_registry(Store(lambda _: None), desk.jobs)
        (login,) = registry._activities.get_all_handlers()
        ask: Any = login.fn
        info = await ask()
        assert info.server == desk.access.server
        assert isinstance(info.aiohttp_session, aiohttp.ClientSession)
        await info.aiohttp_session.close()

    asyncio.run(scenario())
