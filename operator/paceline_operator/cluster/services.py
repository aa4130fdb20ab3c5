"""Keeps the shared Service of a namespace with jobs, and removes it some time later (C10).

Which namespaces have one is asked of the API server once, when this operator begins to lead: an
earlier one may have ended before it removed its last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from paceline_api.names import COORDINATOR_SERVICE

from paceline_operator.cluster.api import Api, ApiError
from paceline_operator.cluster.kube import pause
from paceline_operator.cluster.ownership import apply_own, delete_own
from paceline_operator.core.pods.service import KEEP_S, REFRESH_S, service

log = logging.getLogger("paceline.operator")

LOOK_S: Final = 30.0


class Services:
    """`in_use`: namespaces with jobs that have not ended. `scope`: the only namespace to look at;
    empty for all."""

    def __init__(
        self,
        api: Api,
        clock: Callable[[], float],
        in_use: Callable[[], set[str]],
        scope: str = "",
    ) -> None:
        self._api, self._clock, self._in_use = api, clock, in_use
        self._scope = scope
        self._found = False
        """Those of earlier operators."""
        self._applied_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def ensure(self, namespace: str) -> None:
        """Once for all jobs that ask at the same time. Raises ApiError, and TakenError where
        somebody else has made a Service of this name."""
        async with self._lock(namespace):
            if namespace not in self._applied_s:
                await apply_own(self._api, "services", namespace, service(namespace))
                self._applied_s[namespace] = self._clock()
            self._idle_since_s.pop(namespace, None)

    async def run(self, leads: Callable[[], bool]) -> None:
        """For ever."""
        while True:
            await pause(LOOK_S)
            if leads():
                await self.look(leads)

    async def look(self, leads: Callable[[], bool]) -> None:
        """At each Service once."""
        if not self._found:
            try:
                await self._find()
            except ApiError as error:
                log.warning("the Services %s: %s", COORDINATOR_SERVICE, error)
        for namespace in list(self._applied_s):
            if not leads():
                break
            try:
                await self._look_at(namespace)
            except ApiError as error:
                log.warning("the Service of %s: %s", namespace, error)

    async def _find(self) -> None:
        for namespace in await self._api.namespaces_of(
            "services", COORDINATOR_SERVICE, within=self._scope
        ):
            # Long ago: it is applied again at the first look, if it is in use.
            self._applied_s.setdefault(namespace, float("-inf"))
        self._found = True

    async def _look_at(self, namespace: str) -> None:
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
        async with self._lock(namespace):
            if namespace in self._in_use():
                return
            await delete_own(self._api, "services", namespace, COORDINATOR_SERVICE)
            del self._applied_s[namespace]
            del self._idle_since_s[namespace]

    def _lock(self, namespace: str) -> asyncio.Lock:
        return self._locks.setdefault(namespace, asyncio.Lock())
