"""/metrics, /healthz and /readyz of the operator.

/healthz fails when a watch is dead, so that the kubelet restarts an operator that looks alive and
sees nothing. A standby is healthy and ready: it is there to take over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from paceline_operator.cluster.observe import SILENCE_S, Watch
from paceline_operator.cluster.store import Store
from paceline_operator.metrics import Metrics

DEAD_S: Final = SILENCE_S + 60
"""A watch that gave no sign of life for so long."""


class Watched(Protocol):
    """A watch, by its signs of life."""

    @property
    def kind(self) -> str: ...

    @property
    def age_s(self) -> float: ...

    @property
    def denied(self) -> str:
        """What the operator has no right to, in the words of a role."""
        ...


class Health:
    """`connected`: how many coordinators answer. `jobs`: the watch of TrainingJobs."""

    def __init__(
        self, store: Store, metrics: Metrics, connected: Callable[[], int], jobs: Watched
    ) -> None:
        self._store, self._metrics, self._connected = store, metrics, connected
        self._jobs = jobs
        self.watches: tuple[Watch[Any], ...] = ()

    @property
    def synced(self) -> bool:
        """Everything was seen once."""
        return all(watch.source.synced for watch in self.watches)

    def _all(self) -> tuple[Watched, ...]:
        return (self._jobs, *self.watches)

    def alive(self) -> str:
        """What is wrong, or nothing."""
        dead = [watch.kind for watch in self._all() if watch.age_s > DEAD_S]
        return f"no sign of life on the watch of {', '.join(dead)}" if dead else ""

    def ready(self) -> str:
        """What is wrong, or nothing."""
        denied = [watch.denied for watch in self._all() if watch.denied]
        if denied:
            return f"the operator may not {', '.join(denied)}"
        return "" if self.synced else "not yet synced"

    def page(self) -> bytes:
        metrics = self._metrics
        for watch in self._all():
            metrics.watch_age.labels(watch.kind).set(watch.age_s)
        metrics.set_jobs(self._store.jobs.values())
        metrics.pods.set(self._store.pod_count())
        metrics.coordinators.set(self._connected())
        return metrics.page()


async def serve(health: Health, host: str, port: int) -> web.AppRunner:
    async def healthz(_: web.Request) -> web.Response:
        return _answer(health.alive())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(health.ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=health.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

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
