"""The list of all jobs, read at the start and again every five minutes.

kopf watches TrainingJobs and does not report deletions that happened while its watch was down. The
list shows which jobs are missing.
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
"""Seconds between two lists."""
LIST_RETRY_S: Final = 1.0
"""Seconds until the first list is tried again."""


class Listing:
    """Reader of the list of jobs. `scope` is the only namespace to list; empty for all."""

    def __init__(self, kube: Kube, store: Store, scope: str) -> None:
        self._kube, self._store = kube, store
        self._target = path(PLURAL, scope) if scope else f"/apis/{API_VERSION}/{PLURAL}"

    async def first(self) -> None:
        """Read the first list; retry while the API server is not ready.

        It refuses requests for a moment, for example just after the CRD was installed.

        Raises:
            ApiError: The API server refuses the request for good.
        """
        while True:
            try:
                return await self._list()
            except ApiError as error:
                if not error.transient:
                    raise
                log.warning("the jobs could not be listed yet: %s", error)
                await pause(error.retry_after_s or LIST_RETRY_S)

    async def run(self) -> None:
        """Read the list forever, once in RESYNC_S."""
        while True:
            await pause(RESYNC_S)
            try:
                await self._list()
            except ApiError as error:
                log.warning("the jobs could not be listed: %s", error)

    async def _list(self) -> None:
        before = self._store.uids()
        answer = await self._kube.request("GET", self._target)
        items = answer.get("items", ())
        # The items of a list lack apiVersion and kind, which are the same for all.
        bodies = ({"apiVersion": API_VERSION, "kind": KIND, **item} for item in items)
        self._store.keep_jobs(bodies, before)
