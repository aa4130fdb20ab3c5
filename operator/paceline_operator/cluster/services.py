"""Keeps the shared Service of a namespace with jobs, and removes it some time later (C10)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from paceline_api.names import COORDINATOR_SERVICE

from paceline_operator.cluster.api import Api, ApiError
from paceline_operator.cluster.kube import pause
from paceline_operator.core.pods.service import KEEP_S, REFRESH_S, service

log = logging.getLogger("paceline.operator")


class Services:
    """`in_use`: namespaces with jobs that have not ended."""

    def __init__(
        self, api: Api, clock: Callable[[], float], in_use: Callable[[], set[str]]
    ) -> None:
        self._api, self._clock, self._in_use = api, clock, in_use
        self._applied_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def ensure(self, namespace: str) -> None:
        """Once for all jobs that ask at the same time. Raises ApiError."""
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            if namespace not in self._applied_s:
                await self._api.apply("services", namespace, service(namespace))
                self._applied_s[namespace] = self._clock()
            self._idle_since_s.pop(namespace, None)

    async def run(self, leads: Callable[[], bool]) -> None:
        while True:
            await pause(30.0)
            for namespace in list(self._applied_s):
                if not leads():
                    break
                try:
                    await self._look(namespace)
                except ApiError as error:
                    log.warning("the Service of %s: %s", namespace, error)

    async def _look(self, namespace: str) -> None:
        now_s = self._clock()
        if namespace in self._in_use():
            self._idle_since_s.pop(namespace, None)
            if now_s - self._applied_s[namespace] >= REFRESH_S:
                del self._applied_s[namespace]
                await self.ensure(namespace)
            return
        since_s = self._idle_since_s.setdefault(namespace, now_s)
        if now_s - since_s < KEEP_S:
            return
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            if namespace in self._in_use():
                return
            try:
                await self._api.delete("services", namespace, COORDINATOR_SERVICE)
            except ApiError as error:
                if error.code != 404:
                    raise
            del self._applied_s[namespace]
            del self._idle_since_s[namespace]
