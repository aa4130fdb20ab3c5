"""The queue of decisions, keyed by job: each job at most once, and one decision per job at a time.

A job may be added at any time, for now or for later; the earliest time counts. A job that is added
during its decision is decided once more afterwards, so no news is lost.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from paceline_operator.cluster.store import Key
from paceline_operator.metrics import CONTROLLER, OperatorMetrics

log = logging.getLogger("paceline.operator")

WORKERS: Final = 32
"""Upper bound on the number of concurrent decisions."""
BROKEN_S: Final = 5.0
"""Seconds until the next decision after a bug in one. The bug is logged and must not cause a hot
loop."""

Decide = Callable[[Key], Awaitable[float | None]]
"""Function that decides about one job; returns the seconds until the next decision, None if there
is none."""


class DecisionQueue:
    """Queue of due decisions, run on one event loop once it is open."""

    def __init__(
        self, decide: Decide, metrics: OperatorMetrics, clock: Callable[[], float]
    ) -> None:
        self._decide, self._metrics, self._clock = decide, metrics, clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._news = asyncio.Event()
        self._open = asyncio.Event()
        self._room = asyncio.Semaphore(WORKERS)

    def open(self) -> None:
        """Let decisions begin: this process leads, and the watches have their first lists."""
        self._open.set()

    def close(self) -> None:
        """Start no further decisions; those that run continue."""
        self._open.clear()

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Queue a job for a decision in `after_s` seconds, unless an earlier one is queued."""
        if key in self._busy and after_s == 0.0:
            self._again.add(key)
            return
        at_s = self._clock() + after_s
        if at_s >= self._due.get(key, float("inf")):
            return
        self._due[key] = at_s
        heapq.heappush(self._heap, (at_s, key))
        self._metrics.adds.labels(CONTROLLER).inc()
        self._metrics.depth.labels(CONTROLLER).set(len(self._due))
        self._news.set()

    async def run(self) -> None:
        """Start each decision when it is due, forever.

        One task waits for all jobs, so that an event only wakes the decision that it concerns.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                await self._room.acquire()
                await self._open.wait()
                key = self._next()
                if key is None:
                    self._room.release()
                    await self._wait()
                    continue
                self._busy.add(key)
                group.create_task(self._work(key))

    async def _work(self, key: Key) -> None:
        again_s = await self._one(key)
        self._busy.discard(key)
        self._room.release()
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        elif again_s is not None:
            self.add(key, max(again_s, 0.001))

    def _next(self) -> Key | None:
        now_s = self._clock()
        while self._heap and self._heap[0][0] <= now_s:
            at_s, key = heapq.heappop(self._heap)
            if self._due.get(key) != at_s:
                continue  # the job was queued again for an earlier time
            if key in self._busy:
                del self._due[key]
                self._again.add(key)
                continue
            del self._due[key]
            self._metrics.depth.labels(CONTROLLER).set(len(self._due))
            self._metrics.wait_seconds.labels(CONTROLLER).observe(now_s - at_s)
            return key
        return None

    async def _wait(self) -> None:
        self._news.clear()
        rest_s = self._heap[0][0] - self._clock() if self._heap else None
        try:
            async with asyncio.timeout(rest_s):
                await self._news.wait()
        except TimeoutError:
            return

    async def _one(self, key: Key) -> float | None:
        metrics, started_s = self._metrics, self._clock()
        metrics.active.labels(CONTROLLER).inc()
        result, again_s = "success", None
        try:
            again_s = await self._decide(key)
        except Exception:
            log.exception("a decision failed", extra={"job": "/".join(key)})
            result, again_s = "error", BROKEN_S
        finally:
            metrics.active.labels(CONTROLLER).dec()
            metrics.reconciles.labels(CONTROLLER, result).inc()
            metrics.reconcile_seconds.labels(CONTROLLER).observe(self._clock() - started_s)
        return again_s
