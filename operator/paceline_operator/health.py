"""The operator's /metrics, /healthz and /readyz; /metrics by TLS and token, if configured.

/healthz fails when a watch is dead, so that the kubelet restarts an operator that runs but receives
nothing. A standby is healthy and ready, since it is there to take over.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from paceline_operator.cluster.observe import SILENCE_S, Watch
from paceline_operator.cluster.scrapers import Scrapers
from paceline_operator.cluster.store import Store
from paceline_operator.metrics import OperatorMetrics

DEAD_S: Final = SILENCE_S + 60
"""Seconds without a sign of life after which a watch counts as dead."""


class Watched(Protocol):
    """A watch, by its signs of life."""

    @property
    def kind(self) -> str:
        """Plural name of the resource that is watched."""

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of life."""

    @property
    def denied(self) -> str:
        """The request that the operator may not make, in the terms of a role; empty if none."""
        ...


class Health:
    """Health of the operator.

    `connected` returns the number of coordinators that answer. `jobs` is the watch of TrainingJobs.
    """

    def __init__(
        self, store: Store, metrics: OperatorMetrics, connected: Callable[[], int], jobs: Watched
    ) -> None:
        self._store, self._metrics, self._connected = store, metrics, connected
        self._jobs = jobs
        self.watches: tuple[Watch[Any], ...] = ()

    @property
    def synced(self) -> bool:
        """Return True if every watch besides that of jobs has its first list."""
        return all(watch.source.synced for watch in self.watches)

    def _all(self) -> tuple[Watched, ...]:
        return (self._jobs, *self.watches)

    def alive(self) -> str:
        """Return what is wrong with the watches; empty if nothing is."""
        dead = [watch.kind for watch in self._all() if watch.age_s > DEAD_S]
        return f"no sign of life on the watch of {', '.join(dead)}" if dead else ""

    def ready(self) -> str:
        """Return why the operator cannot work yet; empty if it can."""
        denied = [watch.denied for watch in self._all() if watch.denied]
        if denied:
            return f"the operator may not {', '.join(denied)}"
        return "" if self.synced else "not yet synced"

    def page(self) -> bytes:
        """Return all metrics as text, with the gauges that are computed on request."""
        metrics = self._metrics
        for watch in self._all():
            metrics.watch_age.labels(watch.kind).set(watch.age_s)
        metrics.set_jobs(self._store.jobs.values())
        metrics.pods.set(self._store.pod_count())
        metrics.coordinators.set(self._connected())
        return metrics.page()


@dataclass(frozen=True, slots=True)
class Guarded:
    """A second port that serves /metrics by TLS, to users who may read it."""

    host: str
    port: int
    tls: ssl.SSLContext
    scrapers: Scrapers


@asynccontextmanager
async def serving(
    health: Health, host: str, port: int, guarded: Guarded | None = None
) -> AsyncIterator[list[web.AppRunner]]:
    """Serve HTTP while the block runs.

    Args:
        health: Source of the answers.
        host: Address of the plain port, which the kubelet probes.
        port: Number of the plain port; 0 for a free one.
        guarded: Port that serves /metrics instead of the plain one; None for the plain one.

    Yields:
        The servers, the plain one first.
    """

    async def healthz(_: web.Request) -> web.Response:
        return _answer(health.alive())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(health.ready())

    async def metrics(request: web.Request) -> web.Response:
        if guarded is not None:
            given = request.headers.get("Authorization", "")
            verdict = await guarded.scrapers.verdict(given)
            if verdict != HTTPStatus.OK:
                return web.Response(status=verdict)
        return web.Response(body=health.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    plain, tls = web.Application(), web.Application()
    plain.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    (plain if guarded is None else tls).add_routes([web.get("/metrics", metrics)])
    runners = [web.AppRunner(plain, access_log=None)]
    try:
        await runners[0].setup()
        await web.TCPSite(runners[0], host, port).start()
        if guarded is not None:
            runners.append(web.AppRunner(tls, access_log=None))
            await runners[1].setup()
            at = guarded.host, guarded.port
            await web.TCPSite(runners[1], *at, ssl_context=guarded.tls).start()
        yield runners
    finally:
        for runner in runners:
            await runner.cleanup()


def _answer(wrong: str) -> web.Response:
    return web.json_response({"ok": not wrong, "why": wrong}, status=503 if wrong else 200)
