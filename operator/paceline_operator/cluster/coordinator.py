"""Connections to the coordinators of all jobs: a long poll for news, posts for what they must know.

One task per job. It asks for anything newer than what it has and waits for the answer, so a
thousand quiet jobs cost next to nothing. A job in training has news with every round; then the
task rests between two answers, unless somebody is in a hurry.

A coordinator runs in a pod of a user, and may be any program that has the job's key. So its answers
are bounded in size, depth and time, they may not be compressed, and nobody is followed elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec

from paceline_operator.cluster.kube import pause
from paceline_operator.cluster.store import Key
from paceline_operator.cluster.tls import spare_buffers
from paceline_operator.core.changes import Message
from paceline_operator.core.coordinator_status import CoordinatorStatus, read_coordinator_status
from paceline_operator.core.decide.evidence import POLL_S, REPLY_S
from paceline_operator.core.job import Job
from paceline_operator.core.observed import Inventory
from paceline_operator.core.unheard import TOLD_S, Cause, Unheard

log = logging.getLogger("paceline.operator")


CONNECT_S: Final = 3.0
REST_S: Final = 5.0
"""Between two answers of a job in which all is well."""
IDLE_S: Final = 3 * REST_S
"""A connection that nobody uses is closed. Posts are rare, so each job has one for its polls."""
HURRY_S: Final = 0.1
RETRY_S: Final = 0.1
RETRY_MAX_S: Final = 5.0
AWAY_S: Final = 10.0
"""A coordinator that has not answered for so long is reported as away."""
ANSWER_BYTES: Final = 256 * 1024
"""Bound of a status without its ranks; an honest one's history takes a third of it."""
RANK_BYTES: Final = 4 * 1024
"""Of each rank; honest ones take 1.5 KiB, and some are told of after their death."""


class AnswerError(Exception):
    """No coordinator answers like this."""


FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError, AnswerError)
"""Of a request; it is tried again."""


@dataclass(slots=True)
class Link:
    key: Key
    job: str
    url: str
    token: str
    tls: ssl.SSLContext
    bytes_max: int = ANSWER_BYTES
    """Of an answer."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    seq: int | None = None
    replicas: int = 0
    """Wanted, by the coordinator's last word."""
    answered_s: float = 0.0
    away: bool = True
    unheard: Unheard | None = None
    """Why the last question was not answered."""
    warned: Cause | None = None
    """Of the last line in the log about it."""
    inventory: Inventory | None = None
    """To be sent; only the newest counts."""
    targets: dict[str, Any] = field(default_factory=dict)
    to_send: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Links:
    """`heard` gets each status; `missed`, when it changes, why a question was not answered, and
    whether the coordinator is away: silent for long. `secrets_of`: token and TLS for a job's uid
    and the id of the operator's key, None if that key is lost."""

    def __init__(
        self,
        *,
        secrets_of: Callable[[str, str], tuple[str, ssl.SSLContext] | None],
        heard: Callable[[Key, CoordinatorStatus], None],
        missed: Callable[[Key, Unheard, bool], None],
        arrived: Callable[[Key, Inventory], None],
        clock: Callable[[], float],
        leads: Callable[[], bool],
    ) -> None:
        self._secrets_of, self._arrived = secrets_of, arrived
        self._heard, self._missed = heard, missed
        self._clock, self._leads = clock, leads
        self._links: dict[Key, Link] = {}
        self._told_lost: dict[Key, str] = {}
        """Uids of jobs whose key is lost, so that each is said once."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        spare_buffers()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        tasks = [task for link in self._links.values() for task in link.tasks]
        for key in list(self._links):
            self.leave(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert self._session is not None
        await self._session.close()

    @property
    def connected(self) -> int:
        return sum(not link.away for link in self._links.values())

    # ---- Coordinators -----------------------------------------------------------------------

    def follow(self, key: Key, job: Job, address: str, *, key_id: str, hurry: bool) -> None:
        link = self._links.get(key)
        if link is not None and (link.url, link.job) != (address, job.uid):
            self.leave(key)
            link = None
        if link is None:
            secrets = self._secrets_of(job.uid, key_id)
            if secrets is None:
                self._lost(key, job.uid, address, key_id)
                return
            token, tls = secrets
            link = self._links[key] = Link(key, job.uid, address, token, tls)
            link.answered_s = self._clock()
            link.tasks = [
                asyncio.create_task(self._listen(link)),
                asyncio.create_task(self._speak(link)),
            ]
        link.bytes_max = ANSWER_BYTES + RANK_BYTES * _ranks_of(job)
        if hurry:
            link.hurry.set()
        else:
            link.hurry.clear()

    def _lost(self, key: Key, uid: str, address: str, key_id: str) -> None:
        if self._told_lost.get(key) != uid:
            self._told_lost[key] = uid
            unheard = Unheard(Cause.KEY, _host(address), key_id)
            log.error("%s; %s", unheard.why, unheard.remedy, extra={"job": "/".join(key)})
            self._missed(key, unheard, True)

    def send(self, key: Key, message: Message) -> None:
        link = self._links.get(key)
        if link is None:
            return
        if message.inventory is not None:
            link.inventory = message.inventory
        if message.targets is not None:
            link.targets |= message.targets
        link.to_send.set()

    def leave(self, key: Key) -> None:
        self._told_lost.pop(key, None)
        link = self._links.pop(key, None)
        for task in link.tasks if link is not None else ():
            task.cancel()

    # ---- one link -----------------------------------------------------------------------------

    async def _listen(self, link: Link) -> None:
        delay_s = RETRY_S
        while True:
            try:
                status = await self._ask(link)
            except FAILURES as error:
                self._unanswered(link, error)
                await pause(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)
                continue
            delay_s = RETRY_S
            if link.away:
                log.info("connected to the coordinator at %s", link.url, extra=_of(link))
            link.away, link.answered_s, link.seq = False, self._clock(), status.seq
            link.replicas = status.replicas
            link.unheard = link.warned = None
            self._heard(link.key, status)
            await self._rest(link)

    async def _rest(self, link: Link) -> None:
        """Until somebody is in a hurry, but not for long."""
        await pause(HURRY_S)
        try:
            async with asyncio.timeout(REST_S):
                await link.hurry.wait()
        except TimeoutError:
            return

    async def _ask(self, link: Link) -> CoordinatorStatus:
        query = {"timeout": f"{POLL_S}s"}
        if link.seq is not None:
            query["after"] = str(link.seq)
        return read_coordinator_status(await self._call(link, "GET", "/v1/status", query=query))

    async def _speak(self, link: Link) -> None:
        delay_s = RETRY_S
        while True:
            await link.to_send.wait()
            link.to_send.clear()
            inventory, targets = link.inventory, dict(link.targets)
            if not self._leads():
                # Either the Lease comes back, or somebody else speaks to it and this process ends.
                link.to_send.set()
                await pause(RETRY_MAX_S)
                continue
            try:
                # One that hears of more pods than it knows to be wanted drains the new ones.
                grows = targets.get("replicas", 0) > link.replicas
                if grows:
                    await self._aim(link, targets)
                if inventory is not None:
                    await self._call(link, "POST", "/v1/inventory", body=inventory.body())
                    if link.inventory is inventory:
                        link.inventory = None
                    self._arrived(link.key, inventory)
                if targets and not grows:
                    await self._aim(link, targets)
                delay_s = RETRY_S
            except FAILURES as error:
                log.info("the coordinator did not hear: %s", _why(error), extra=_of(link))
                link.to_send.set()
                await pause(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _aim(self, link: Link, targets: dict[str, Any]) -> None:
        await self._call(link, "POST", "/v1/targets", body=targets)
        if link.targets == targets:
            link.targets = {}

    def _unanswered(self, link: Link, error: Exception) -> None:
        unheard = Unheard(_cause(error), _host(link.url), _why(error))
        silent_s = self._clock() - link.answered_s
        lost = not link.away and silent_s >= AWAY_S
        link.away = link.away or lost
        changed = link.unheard is None or link.unheard.cause is not unheard.cause
        link.unheard = unheard
        # The image of one that has never answered may still be on the way.
        patience_s = TOLD_S if link.seq is None else AWAY_S
        if silent_s >= patience_s and link.warned is not unheard.cause:
            link.warned = unheard.cause
            log.warning("the coordinator does not answer: %s", unheard.why, extra=_of(link))
        if lost or changed:
            self._missed(link.key, unheard, link.away)

    async def _call(
        self,
        link: Link,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> Any:
        assert self._session is not None
        headers = {"Authorization": f"Bearer {link.token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(
            total=REPLY_S + (POLL_S if query else 0), sock_connect=CONNECT_S
        )
        async with self._session.request(
            method,
            link.url + path,
            params=query,
            headers=headers,
            data=msgspec.json.encode(body) if body is not None else None,
            ssl=link.tls if link.url.startswith("https") else True,
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            response.raise_for_status()
            raw = await _read(response, link.bytes_max)
        try:
            return msgspec.json.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise AnswerError(
                f"it answers {path} with what is no JSON of its kind: {error}"
            ) from None


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    if response.status != HTTPStatus.OK:
        raise AnswerError(f"it answers with status {response.status}")
    if "Content-Encoding" in response.headers:
        raise AnswerError("it answers compressed, which nobody has asked for")
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > most:
            raise AnswerError(f"its answer is longer than {most} bytes")
    return bytes(raw)


def _ranks_of(job: Job) -> int:
    if job.settings is None:
        return 0
    return max(job.settings.replicas, job.settings.max_replicas or 0) * (
        job.settings.procs_per_replica
    )


def _of(link: Link) -> dict[str, str]:
    return {"job": "/".join(link.key)}


def _host(url: str) -> str:
    return url.partition("://")[2]


def _cause(error: Exception) -> Cause:
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return Cause.TLS
    if isinstance(error, TimeoutError):
        return Cause.TIMEOUT
    if isinstance(error, aiohttp.ClientResponseError) and error.status == HTTPStatus.UNAUTHORIZED:
        return Cause.TOKEN
    below = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return Cause.REFUSED if isinstance(below, ConnectionRefusedError) else Cause.OTHER


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
