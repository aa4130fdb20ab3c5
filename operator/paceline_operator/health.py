"""/metrics, /healthz and /readyz of the operator.

/healthz fails when a watch is dead, so that the kubelet restarts an operator that looks alive and
sees nothing. A standby is healthy and ready: it is there to take over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True)
class Checks:
    """Each gives what is wrong, or nothing."""

    alive: Callable[[], str]
    ready: Callable[[], str]
    page: Callable[[], bytes]


async def serve(checks: Checks, host: str, port: int) -> web.AppRunner:
    async def healthz(_: web.Request) -> web.Response:
        return _answer(checks.alive())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(checks.ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=checks.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


def _answer(wrong: str) -> web.Response:
    return web.json_response({"ok": not wrong, "why": wrong}, status=503 if wrong else 200)
