"""The part that uses kopf, which watches TrainingJobs and hands each event to the store.

Nothing else of kopf is used (C11): no handlers of changes, daemons, timers, peering, finalizers,
annotations on the user's object, or Events. A decision uses only the store, so a lost or repeated
event makes no difference.

kopf does not report the health of its watch. Its requests are therefore sent over a session that is
made here, and each watch that the API server answers is a sign of life. The server ends a watch
after a minute, and kopf begins the next one.
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
"""Seconds that the operator waits for a right that it lacks before it ends."""
WATCH_S: Final = 60
"""Seconds after which the API server ends a watch of jobs."""


class JobsWatch:
    """Signs of life of kopf's watch of jobs, and the login that kopf uses."""

    kind: Final = PLURAL

    def __init__(self, access: Access, clock: Callable[[], float]) -> None:
        self._access, self._clock = access, clock
        self._heard_s = clock()
        self._denied_s = 0.0
        """Time since which a right is missing; only valid while `denied` is set."""
        self.denied = ""
        self._given: Login | None = None
        """Login that kopf was given last."""

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of life."""
        return self._clock() - self._heard_s

    def note_event(self) -> None:
        """Record a sign of life."""
        self._heard_s = self._clock()

    async def let_in(self) -> kopf.AiohttpSession:
        """Return a session for kopf, which asks at its start and whenever its session is refused.

        Returns:
            A session with the present login, renewed if kopf already had that one.
        """
        if self._given is self._access.login and not await self._renewed(self._given):
            await pause(PAUSE_S)
        self._given = login = self._access.login
        return kopf.AiohttpSession(
            server=login.server,
            default_namespace=login.namespace,
            aiohttp_session=self.session(login),
        )

    def session(self, login: Login) -> aiohttp.ClientSession:
        """Return an HTTP session that signs requests and records signs of life; kopf closes it."""
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
            self.note_event()
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
        """Report a missing right, and end the operator if it stays missing.

        A starting API server knows no roles yet. kopf retries for a minute and then ends the
        operator without naming a remedy. This method raises PacelineError with one once the right
        has been missing for DENIED_S.

        Args:
            what: The request in the terms of a role.
            raw: Body of the refusal.
        """
        now_s = self._clock()
        missing = denied(what, words_of(raw)[1])
        if not self.denied:
            self._denied_s = now_s
            log.error("%s; %s", missing.message, missing.hint)
        self.denied = what
        if now_s - self._denied_s >= DENIED_S:
            raise missing


def make_registry(store: Store, watch: JobsWatch) -> kopf.OperatorRegistry:
    """Return kopf's handlers: one for logins, one that stores each event of a job."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return await watch.let_in()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def on_event(type: str | None, body: Mapping[str, Any], **_: Any) -> None:  # noqa: A002
        watch.note_event()
        plain = _plain(body)
        metadata = plain["metadata"]
        if type == "DELETED":
            store.drop_job((metadata["namespace"], metadata["name"]), metadata["uid"])
        else:
            store.put_job(plain)

    return registry


class NoEssence(kopf.DiffBaseStorage):
    """Storage that keeps kopf from copying each object to find changes, which nothing uses."""

    def build(self, **_: Any) -> Any:
        """Return nothing, so that no object is copied."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Return None, since nothing is stored."""
        return None  # noqa: RET501 - kopf expects an essence or None

    def store(self, **_: Any) -> None:
        """Fail, since kopf stores an essence only for handlers of changes.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("there are no handlers of changes")


def make_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: no peering, no Events, and watches that end after a minute."""
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = NoEssence()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    # End a watch that died silently: the server does so, or else the inactivity timeout.
    settings.watching.server_timeout = WATCH_S
    settings.watching.inactivity_timeout = WATCH_S + 10
    settings.watching.connect_timeout = CONNECT_S
    settings.networking.request_timeout = 15
    settings.queueing.idle_timeout = 5
    # At INFO kopf logs what it does for each object.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return settings


def _signed(request: aiohttp.ClientRequest, login: Login) -> aiohttp.ClientRequest:
    """Replace the headers of a login in a request; returns the request."""
    headers = login.headers()
    for name, _ in headers:
        request.headers.popall(name, None)
    for name, value in headers:
        request.headers.add(name, value)
    request.server_hostname = login.server_name
    return request


def _plain(value: Any) -> Any:
    """Return kopf's views of an object as ordinary dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
