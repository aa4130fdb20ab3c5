"""All jobs in one request: at the start, and again from time to time.

kopf watches TrainingJobs and tells of no deletion that happened while its watch was away; the list
shows which are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

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
        before = dict(self._store.jobs)
        found = await self._kube.request("GET", self._target)
        uids = set()
        for item in found.get("items", ()):
            body = {"apiVersion": API_VERSION, "kind": KIND, **item}
            uids.add(body["metadata"]["uid"])
            self._store.put_job(body)
        for key, known in before.items():
            if known["metadata"]["uid"] not in uids:
                self._store.drop_job(key, known["metadata"]["uid"])

    def namespaces_in_use(self) -> set[str]:
        """Those with jobs that have not ended."""
        return {key[0] for key, body in self._store.jobs.items() if not _has_ended(body)}


def _has_ended(body: Mapping[str, Any]) -> bool:
    conditions = (body.get("status") or {}).get("conditions") or ()
    return any(
        c.get("type") in ("Complete", "Failed") and c.get("status") == "True" for c in conditions
    )
