"""Driver that tells each runtime in its status whether jobs can be merged with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from paceline_api.types.enums import RuntimeKind
from paceline_api.types.job import API_VERSION
from paceline_api.types.runtime import PLURALS

from paceline_operator.cluster.api import Api, ApiError
from paceline_operator.cluster.kube import pause
from paceline_operator.cluster.store import Store
from paceline_operator.cluster.wire import runtime_from
from paceline_operator.core.runtime import RuntimeKey, SeenRuntime, judge

log = logging.getLogger("paceline.operator")

LOOK_S: Final = 1.0
"""Seconds between two looks at the runtimes; one that did not change costs nothing."""
RETRY_LOOKS: Final = 30
"""Looks until a status that could not be written is tried again."""


class RuntimeReports:
    """Writer of the statuses of all runtimes; only the leader writes."""

    def __init__(self, api: Api, store: Store, clock: Callable[[], float]) -> None:
        self._api, self._store, self._clock = api, store, clock
        self._waits: dict[RuntimeKey, int] = {}
        """Looks that are left until a refused write is tried again."""

    async def run(self, leads: Callable[[], bool]) -> None:
        """Look at the runtimes forever, as long as this operator leads."""
        while True:
            await pause(LOOK_S)
            if leads():
                await self.look(leads)

    async def look(self, leads: Callable[[], bool]) -> None:
        """Write the status of each runtime whose spec was not judged yet."""
        runtimes = dict(self._store.runtimes)
        self._waits = {key: left - 1 for key, left in self._waits.items() if key in runtimes}
        for key, stored in runtimes.items():
            if not leads():
                break
            status = judge(stored, self._clock())
            if status is None or self._waits.get(key, 0) > 0:
                continue
            try:
                await self._write(stored, status)
                self._waits.pop(key, None)
            except ApiError as error:
                # Jobs use the runtime all the same, so a missing right is no reason to end.
                self._waits[key] = RETRY_LOOKS
                log.warning("the status of %s: %s", stored.runtime.title, error)

    async def _write(self, stored: SeenRuntime, status: dict[str, object]) -> None:
        manifest = {
            "apiVersion": API_VERSION,
            "kind": stored.kind,
            "metadata": {"name": stored.name, "uid": stored.uid}
            | ({"namespace": stored.namespace} if stored.namespace else {}),
            "status": status,
        }
        plural = PLURALS[RuntimeKind(stored.kind)]
        body = await self._api.apply(
            plural, stored.namespace, manifest, force=True, subresource="status"
        )
        self._store.put_runtime(runtime_from(body, stored.kind))
