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
from paceline_api.access.access import PAUSE_S, Access
from paceline_api.access.login import Login
from paceline_api.crdgen import PLURAL
from paceline_api.types.job import GROUP, VERSION

from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.kube import CONNECT_S, pause, renewed
from paceline_operator.cluster.rights import asked, denied, words_of
from paceline_operator.cluster.store import Store

log = logging.getLogger("paceline.operator")

DENIED_S: Final = 30
"""So long the operator waits for a right that it lacks."""
WATCH_S: Final = 60
"""So long the API server keeps one watch of jobs open."""


class JobsWatch:
    """Signs of life of kopf's watch."""

    kind: Final = PLURAL

    def __init__(self, access: Access, clock: Callable[[], float]) -> None:
        self._access, self._clock = access, clock
        self._heard_s = clock()
        self._denied_s = 0.0
        """Since when."""
        self.denied = ""
        self._given: Login | None = None
        """With which kopf was let in last."""

    @property
    def age_s(self) -> float:
        """Since the last one."""
        return self._clock() - self._heard_s

    def heard(self) -> None:
        self._heard_s = self._clock()

    async def let_in(self) -> kopf.AiohttpSession:
        """kopf asks at its start, and again whenever its session is refused."""
        if self._given is self._access.login and not await self._renewed(self._given):
            await pause(PAUSE_S)
        self._given = login = self._access.login
        return kopf.AiohttpSession(
            server=login.server,
            default_namespace=login.namespace,
            aiohttp_session=self.session(login),
        )

    def session(self, login: Login) -> aiohttp.ClientSession:
        """For kopf, which closes it."""
        tls = login.tls if login.tls is not None else True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            proxy=login.proxy,
            middlewares=[self._carry_out],
        )

    async def _carry_out(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        login = self._access.login
        response = await send(_signed(request, login))
        if response.status == HTTPStatus.UNAUTHORIZED and await self._renewed(login):
            response.release()
            response = await send(_signed(request, self._access.login))
        if response.status == HTTPStatus.OK and "watch" in request.url.query:
            self.heard()
        if response.status == HTTPStatus.FORBIDDEN:
            watch = "watch" in request.url.query
            self._deny(asked(request.method, request.url.path, watch=watch), await response.read())
        elif response.status == HTTPStatus.OK:
            self.denied = ""
        return response

    async def _renewed(self, refused: Login) -> bool:
        try:
            return await renewed(self._access, refused)
        except ApiError as error:
            log.warning("the login could not be renewed: %s", error.message)
            return False

    def _deny(self, what: str, raw: bytes) -> None:
        """Raises PacelineError when it lasts. An API server that begins knows no roles yet, so kopf
        tries again for a minute, and then ends the operator without a word of what to do."""
        now_s = self._clock()
        missing = denied(what, words_of(raw)[1])
        if not self.denied:
            self._denied_s = now_s
            log.error("%s; %s", missing.message, missing.hint)
        self.denied = what
        if now_s - self._denied_s >= DENIED_S:
            raise missing


def make_registry(store: Store, watch: JobsWatch) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return await watch.let_in()

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


class NoEssence(kopf.DiffBaseStorage):
    """kopf copies each object of each event to find out what has changed, though nobody asks."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("there are no handlers of changes")


def make_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = NoEssence()
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


def _signed(request: aiohttp.ClientRequest, login: Login) -> aiohttp.ClientRequest:
    said = login.headers()
    for name, _ in said:
        request.headers.popall(name, None)
    for name, value in said:
        request.headers.add(name, value)
    request.server_hostname = login.server_name
    return request


def _plain(value: Any) -> Any:
    """kopf's views of an object as ordinary mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
