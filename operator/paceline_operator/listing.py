"""All jobs in one request: at the start, and again from time to time.

kopf watches TrainingJobs and tells of no deletion that happened while its watch was away; the list
shows which are missing.
"""

from __future__ import annotations

import logging
from typing import Final

from paceline_api.crdgen import PLURAL
from paceline_api.types.job import API_VERSION, KIND

from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.kube import Kube, path, pause
from paceline_operator.cluster.store import Store

log = logging.getLogger("paceline.operator")

RESYNC_S: Final = 300.0
LIST_RETRY_S: Final = 1.0


class Listing:
    """`scope`: the only namespace that is looked at; empty for all."""

    def __init__(self, kube: Kube, store: Store, scope: str) -> None:
        self._kube, self._store = kube, store
        self._target = path(PLURAL, scope) if scope else f"/apis/{API_VERSION}/{PLURAL}"

    async def first(self) -> None:
        """The API server refuses for a moment, such as just after the CRD was installed."""
        while True:
            try:
                return await self._list()
            except ApiError as error:
                if not error.transient:
                    raise
                log.warning("the jobs could not be listed yet: %s", error)
                await pause(error.retry_after_s or LIST_RETRY_S)

    async def run(self) -> None:
        """For ever."""
        while True:
            await pause(RESYNC_S)
            try:
                await self._list()
            except ApiError as error:
                log.warning("the jobs could not be listed: %s", error)

    async def _list(self) -> None:
        before = self._store.uids()
        found = await self._kube.request("GET", self._target)
        items = found.get("items", ())
        # A list leaves out of its items what is the same for all.
        bodies = ({"apiVersion": API_VERSION, "kind": KIND, **item} for item in items)
        self._store.keep_jobs(bodies, before)
