"""What an agent serves: /metrics and /steps of all ranks of the pod, and /healthz."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

from aiohttp import web
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline.core.anatomy.samples import STEPS_PATH
from paceline.telemetry.collector import CONTENT_TYPE, OPENMETRICS_TYPE

PORTS_TRIED: Final = 256
"""On a laptop, where the agents of several replicas share one machine."""


class HttpServer:
    def __init__(
        self,
        metrics: Callable[[bool], bytes],
        health: Callable[[], dict[str, object]],
        steps: Callable[[], bytes],
    ) -> None:
        """`metrics` is told whether exemplars are understood."""
        self._metrics, self._health, self._steps = metrics, health, steps
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/healthz", self._get_health),
                web.get(STEPS_PATH, self._get_steps),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int, *, search: bool) -> int:
        """Listens; returns the port. `search`: take the next free port if this one is in use."""
        await self._runner.setup()
        last = min(port + PORTS_TRIED, 65535) if search and port else port
        for candidate in range(port, last + 1):
            site = web.TCPSite(self._runner, host, candidate)
            try:
                await site.start()
            except OSError as error:
                if error.errno == errno.EADDRINUSE and candidate < last:
                    continue
                told = os.strerror(error.errno or 0).lower()
                raise PacelineError(
                    f"spec.metrics.port: {candidate} cannot be used: {told}",
                    hint="choose another port; 0 takes any free one",
                    exit_code=EXIT_BAD_INPUT,
                ) from error
            return int(self._runner.addresses[-1][1])
        raise AssertionError("unreachable: the loop returns or raises")

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _get_metrics(self, request: web.Request) -> web.Response:
        exemplars = OPENMETRICS_TYPE.partition(";")[0] in request.headers.get("Accept", "")
        kind = OPENMETRICS_TYPE if exemplars else CONTENT_TYPE
        return web.Response(body=self._metrics(exemplars), headers={"Content-Type": kind})

    async def _get_steps(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._steps(), content_type="application/json")

    async def _get_health(self, _request: web.Request) -> web.Response:
        return web.json_response(self._health())
