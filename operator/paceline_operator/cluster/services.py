"""The shared Service of each namespace with jobs, and its removal some time later (C10).

The API server is asked once, when this operator begins to lead, which namespaces have the Service:
an earlier operator may have ended before it removed its last one.
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
"""Seconds between two looks at the Services."""


class Services:
    """The shared Services of all namespaces.

    `in_use` returns the namespaces with jobs that have not ended. `scope` is the only namespace to
    look at; empty for all.
    """

    def __init__(
        self,
        api: Api,
        clock: Callable[[], float],
        in_use: Callable[[], set[str]],
        scope: str = "",
    ) -> None:
        self._api, self._clock, self._in_use = api, clock, in_use
        self._scope = scope
        self._listed = False
        """True if the Services of earlier operators were listed."""
        self._applied_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def ensure(self, namespace: str) -> None:
        """Make sure that a namespace has the Service; once for all jobs that ask at the same time.

        ApiError passes to the caller, as TakenError if another owner has made a Service of this
        name.

        Args:
            namespace: The namespace.
        """
        async with self._lock(namespace):
            if namespace not in self._applied_s:
                await apply_own(self._api, "services", namespace, service(namespace))
                self._applied_s[namespace] = self._clock()
            self._idle_since_s.pop(namespace, None)

    async def run(self, leads: Callable[[], bool]) -> None:
        """Look at the Services forever, as long as this operator leads."""
        while True:
            await pause(LOOK_S)
            if leads():
                await self.look(leads)

    async def look(self, leads: Callable[[], bool]) -> None:
        """Look at each Service once: apply it again, or remove it if it is unused for long."""
        if not self._listed:
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
            # Treat it as applied long ago, so that the first look applies it if it is in use.
            self._applied_s.setdefault(namespace, float("-inf"))
        self._listed = True

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
