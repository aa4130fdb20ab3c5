"""The HTTP server of an agent: /metrics and /steps of all ranks of the pod, and /healthz.

/steps requires a token that is derived from the job's own (`core.anatomy.steps_token`). /metrics
requires none, as is usual for what Prometheus scrapes: a NetworkPolicy says who reaches it.
"""

from __future__ import annotations

import errno
import hmac
import os
import socket
from collections.abc import Callable
from typing import Final

from aiohttp import web
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline.control.front import Front
from paceline.core.admission import Bounds
from paceline.core.anatomy.samples import STEPS_PATH
from paceline.core.anatomy.steps_token import STEPS_HEADER, WRONG_TOKEN, steps_token
from paceline.limits import LISTEN_BACKLOG, PORTS_TRIED
from paceline.refusals import Entry, Refusals
from paceline.telemetry.collector import CONTENT_TYPE, OPENMETRICS_TYPE

BOUNDS: Final = Bounds(connections=64, of_one_address=32)
"""Limits on connections. A Prometheus, the kubelet and an API server have one each, or a few."""


class HttpServer:
    """Serves metrics, steps and health of one pod."""

    def __init__(
        self,
        metrics: Callable[[bool], bytes],
        health: Callable[[], dict[str, object]],
        steps: Callable[[], bytes],
        *,
        token: str,
        refusals: Refusals,
    ) -> None:
        """Set the routes up. Nothing listens before `start`.

        Args:
            metrics: Returns the page of metrics. Its argument is True if the client understands
                exemplars.
            health: Returns the JSON object for /healthz.
            steps: Returns the JSON text for /steps.
            token: Token of the job's ranks, from which the token for /steps is derived.
            refusals: Counts refused requests.
        """
        self._metrics, self._health, self._steps = metrics, health, steps
        self._steps_token = steps_token(token).encode()
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/healthz", self._get_health),
                web.get(STEPS_PATH, self._get_steps),
            ]
        )
        self._front = Front(app, Entry.AGENT_HTTP, lambda: BOUNDS, refusals)

    async def start(self, host: str, port: int, *, search: bool) -> int:
        """Listen and serve.

        It raises PacelineError if the port cannot be used.

        Args:
            host: Address to listen on.
            port: Port to listen on. 0: any free one.
            search: True to take the next free port if this one is in use.

        Returns:
            The port.
        """
        listener = _listen(host, port, search=search)
        bound = int(listener.getsockname()[1])
        await self._front.start(listener)
        return bound

    async def stop(self) -> None:
        """Close the listener and all connections."""
        await self._front.stop()

    async def _get_metrics(self, request: web.Request) -> web.Response:
        exemplars = OPENMETRICS_TYPE.partition(";")[0] in request.headers.get("Accept", "")
        kind = OPENMETRICS_TYPE if exemplars else CONTENT_TYPE
        return web.Response(body=self._metrics(exemplars), headers={"Content-Type": kind})

    async def _get_steps(self, request: web.Request) -> web.Response:
        given = request.headers.get(STEPS_HEADER, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._steps_token):
            message = f"the header {STEPS_HEADER} is missing or wrong"
            return web.json_response({"message": message, "reason": WRONG_TOKEN}, status=403)
        return web.Response(body=self._steps(), content_type="application/json")

    async def _get_health(self, _request: web.Request) -> web.Response:
        return web.json_response(self._health())


def _listen(host: str, port: int, *, search: bool) -> socket.socket:
    last = min(port + PORTS_TRIED, 65535) if search and port else port
    for candidate in range(port, last + 1):
        try:
            return socket.create_server((host, candidate), backlog=LISTEN_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and candidate < last:
                continue
            reason = os.strerror(error.errno or 0).lower()
            raise PacelineError(
                f"spec.metrics.port: {candidate} cannot be used: {reason}",
                hint="choose another port; 0 takes any free one",
                exit_code=EXIT_BAD_INPUT,
            ) from error
    raise AssertionError("unreachable: the loop returns or raises")
