"""kopf's part: it watches TrainingJobs and hands each of their events to the store.

Nothing else of kopf is used (C11): no handlers of changes, no daemons, no timers, no peering, no
finalizers, no annotations on the user's object, no Events. What a decision needs is in the store,
and a lost or repeated event makes no difference.

kopf says nothing of how its watch does. So it gets its requests carried out here, where each watch
that the API server answers is a sign of life: the server ends one after a minute, and kopf begins
the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import kopf
from paceline_api.crdgen import PLURAL
from paceline_api.types.job import GROUP, VERSION

from paceline_operator.cluster.credentials import Credentials
from paceline_operator.cluster.kube import CONNECT_S
from paceline_operator.cluster.store import Store

WATCH_S: Final = 60
"""So long the API server keeps one watch of jobs open."""


class JobsWatch:
    """Signs of life of kopf's watch."""

    kind: Final = PLURAL

    def __init__(self, access: Credentials, clock: Callable[[], float]) -> None:
        self._access, self._clock = access, clock
        self._heard_s = clock()

    @property
    def age_s(self) -> float:
        """Since the last one."""
        return self._clock() - self._heard_s

    def heard(self) -> None:
        self._heard_s = self._clock()

    def session(self) -> aiohttp.ClientSession:
        """For kopf, which closes it."""
        tls = self._access.tls if self._access.tls is not None else True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls), middlewares=[self._carry_out]
        )

    async def _carry_out(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        request.headers.update(self._access.headers())
        response = await send(request)
        if response.status == HTTPStatus.OK and "watch" in request.url.query:
            self.heard()
        return response


def make_registry(store: Store, watch: JobsWatch, access: Credentials) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(
            server=access.server,
            default_namespace=access.namespace,
            aiohttp_session=watch.session(),
        )

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def seen(type: str | None, body: Mapping[str, Any], **_: Any) -> None:  # noqa: A002
        watch.heard()
        plain = _plain(body)
        metadata = plain["metadata"]
        if type == "DELETED":
            store.drop_job((metadata["namespace"], metadata["name"]), metadata["uid"])
        else:
            store.put_job(plain)

    return registry


def make_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    # A watch that dies silently: the server ends it, or the silence does.
    settings.watching.server_timeout = WATCH_S
    settings.watching.inactivity_timeout = WATCH_S + 10
    settings.watching.connect_timeout = CONNECT_S
    settings.networking.request_timeout = 15
    settings.queueing.idle_timeout = 5
    # kopf says at INFO what it does for each object.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return settings


def _plain(value: Any) -> Any:
    """kopf's views of an object as ordinary mappings, without the bookkeeping of field owners."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key != "managedFields"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
