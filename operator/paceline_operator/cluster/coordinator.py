"""Connections to the coordinators of all jobs: a long poll for news, and posts of what changes.

There are two tasks per job. One asks for anything newer than the last answer and waits, so a
thousand idle jobs cost next to nothing. A job in training has news with every round; the task then
rests between two answers, unless news is wanted at once.

A coordinator runs in a pod of a user, and may be any program that has the job's key. It must
announce the length of its answer before anything is read. The answer is limited in size and time,
must not be compressed, and redirects are not followed. Bytes and decode time are taken from the
shares of the job and its namespace (core.shares). Decoding happens in one thread beside the event
loop, one answer at a time, and each job has at most one answer in that queue (C19).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler
from paceline_api.errors import printable
from paceline_api.status import Status

from paceline_operator.cluster.kube import pause
from paceline_operator.cluster.store import Key
from paceline_operator.cluster.tls import spare_buffers
from paceline_operator.core.changes import CoordinatorMessage
from paceline_operator.core.coordinator_status import (
    AnswerError,
    RefusedAnswer,
    StatusLimits,
    read_coordinator_status,
)
from paceline_operator.core.decide.evidence import POLL_S, REPLY_S
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import PodInventory
from paceline_operator.core.shares import Rate, Shares
from paceline_operator.core.unheard import TOLD_S, Unheard, UnreachableCause
from paceline_operator.metrics import OperatorMetrics

log = logging.getLogger("paceline.operator")


CONNECT_S: Final = 3.0
"""Timeout of a connection attempt, in seconds."""
REST_S: Final = 5.0
"""Seconds between two answers of a job without problems."""
IDLE_S: Final = 3 * REST_S
"""Seconds after which an unused connection is closed. Posts are rare, so each job needs one for its
polls."""
HURRY_S: Final = 0.1
"""Least number of seconds between two answers of a job."""
RETRY_S: Final = 0.1
"""Delay before the first retry in seconds; it doubles up to RETRY_MAX_S."""
RETRY_MAX_S: Final = 5.0
AWAY_S: Final = 10.0
"""Seconds without an answer after which a coordinator counts as away."""
SAID_S: Final = 60.0
"""Seconds between two log lines: about refused answers for each namespace, about silence for each
job and cause."""
REPLY_BYTES: Final = 64 * 1024
"""Upper bound on the answer to a post, which is read and discarded."""
DETAIL_MAX: Final = 300
"""Upper bound on the text of an error, parts of which come from the coordinator."""
READ_BYTES: Final = 64 * 1024
"""Number of bytes read at once."""
HEADER_BYTES: Final = 1024
"""Upper bound on one header of an answer; there may be 128."""

NAMESPACE_BYTES: Final = Rate(per_s=16 * 1024 * 1024, burst=64 * 1024 * 1024)
"""Bytes of answers that all jobs of a namespace may send. A thousand honest jobs with 80 KiB every
5 s take all of it."""
JOB_ANSWERS: Final = Rate(per_s=0.4, burst=8.0)
"""Number of answers of one job, if each has the largest allowed length. Shorter ones may be more:
an honest job sends some in a row while it settles."""
NAMESPACE_DECODE_S: Final = Rate(per_s=0.25, burst=1.0)
"""Seconds of the decoding thread that all jobs of a namespace may use, per second."""
JOB_DECODE_S: Final = Rate(per_s=0.05, burst=0.5)
"""Seconds of the decoding thread that one job may use, per second."""


FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError, AnswerError)
"""Errors of a request after which it is tried again."""


@dataclass(slots=True)
class CoordinatorLink:
    """State of the connection to one coordinator."""

    key: Key
    job: str
    url: str
    token: str
    tls: ssl.SSLContext
    limits: StatusLimits = field(default_factory=StatusLimits)
    """Limits of an answer."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    seq: int | None = None
    replicas: int = 0
    """Target size that the coordinator has last reported."""
    answered_s: float = 0.0
    away: bool = True
    unheard: Unheard | None = None
    """Failure of the last request; None if it was answered."""
    warned_s: dict[UnreachableCause, float] = field(default_factory=dict)
    """Time of the last log line about each cause."""
    inventory: PodInventory | None = None
    """Inventory to send; only the newest one counts."""
    targets: dict[str, Any] = field(default_factory=dict)
    to_send: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Links:
    """Connections to all coordinators; implements `controller.Coordinators` on one event loop.

    `on_status` receives each status. `missed` receives the failure of a request, and True if the
    coordinator is away, whenever the cause changes or the coordinator goes away. `arrived` receives
    each inventory that the coordinator has acknowledged. `secrets_of` returns token and TLS context
    for a job's uid and a key id, or None if that key is lost.
    """

    def __init__(
        self,
        *,
        secrets_of: Callable[[str, str], tuple[str, ssl.SSLContext] | None],
        on_status: Callable[[Key, Status], None],
        missed: Callable[[Key, Unheard, bool], None],
        arrived: Callable[[Key, PodInventory], None],
        clock: Callable[[], float],
        leads: Callable[[], bool],
        metrics: OperatorMetrics,
    ) -> None:
        self._secrets_of, self._arrived = secrets_of, arrived
        self._on_status, self._missed = on_status, missed
        self._clock, self._leads = clock, leads
        self._metrics = metrics
        self._bytes, self._seconds = Shares(NAMESPACE_BYTES), Shares(NAMESPACE_DECODE_S)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._turn = asyncio.Lock()
        """Held by the task that uses the decoding thread."""
        self._refused: dict[str, AnswerRefusals] = {}
        """Refused answers by namespace, for the log."""
        self._links: dict[Key, CoordinatorLink] = {}
        self._told_lost: dict[Key, str] = {}
        """Uids of jobs whose key is lost, so that each is logged once."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        spare_buffers()
        connector = Connector(limit=0, keepalive_timeout=IDLE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
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
        self._thread.shutdown(cancel_futures=True)

    @property
    def connected(self) -> int:
        """Number of coordinators that answer."""
        return sum(not link.away for link in self._links.values())

    # ---- Coordinators -----------------------------------------------------------------------

    def follow(
        self, key: Key, job: JobObject, address: str, *, key_id: str, pods: int, hurry: bool
    ) -> None:
        """Connect to a coordinator, or keep the connection if it exists.

        Another address or another job under this name ends the old connection.

        Args:
            key: Namespace and name of the job.
            job: The job.
            address: URL of the coordinator.
            key_id: Id of the operator's key with which the secrets of its pod were made.
            pods: Number of existing worker pods, from which the limits follow.
            hurry: True to ask for news at once.
        """
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
            link = self._links[key] = CoordinatorLink(key, job.uid, address, token, tls)
            link.answered_s = self._clock()
            link.tasks = [
                asyncio.create_task(self._listen(link)),
                asyncio.create_task(self._speak(link)),
            ]
        link.limits = StatusLimits.of(pods, job.settings.procs_per_replica if job.settings else 1)
        if hurry:
            link.hurry.set()
        else:
            link.hurry.clear()

    def _lost(self, key: Key, uid: str, address: str, key_id: str) -> None:
        if self._told_lost.get(key) != uid:
            self._told_lost[key] = uid
            unheard = Unheard(UnreachableCause.KEY, _host(address), key_id)
            log.error("%s; %s", unheard.why, unheard.remedy, extra={"job": "/".join(key)})
            self._missed(key, unheard, True)

    def send(self, key: Key, message: CoordinatorMessage) -> None:
        """Queue a message for a coordinator; without a connection it is dropped."""
        link = self._links.get(key)
        if link is None:
            return
        if message.inventory is not None:
            link.inventory = message.inventory
        if message.targets is not None:
            link.targets |= message.targets
        link.to_send.set()

    def leave(self, key: Key) -> None:
        """End the connection to a coordinator, if there is one."""
        self._told_lost.pop(key, None)
        link = self._links.pop(key, None)
        for task in link.tasks if link is not None else ():
            task.cancel()

    # ---- one link -----------------------------------------------------------------------------

    async def _listen(self, link: CoordinatorLink) -> None:
        delay_s = RETRY_S
        while True:
            try:
                status = await self._ask(link)
            except FAILURES as error:
                self._unanswered(link, error)
                retry_s = error.retry_s if isinstance(error, AnswerError) else 0.0
                await pause(max(delay_s, retry_s))
                delay_s = min(2 * delay_s, RETRY_MAX_S)
                continue
            delay_s = RETRY_S
            if link.away:
                log.info("connected to the coordinator at %s", link.url, extra=_of(link))
            link.away, link.answered_s, link.seq = False, self._clock(), status.seq
            link.replicas = status.replicas
            link.unheard = None
            self._on_status(link.key, status)
            await self._rest(link)

    async def _rest(self, link: CoordinatorLink) -> None:
        """Wait until news is wanted at once, but not for long."""
        await pause(HURRY_S)
        try:
            async with asyncio.timeout(REST_S):
                await link.hurry.wait()
        except TimeoutError:
            return

    async def _ask(self, link: CoordinatorLink) -> Status:
        query = {"timeout": f"{POLL_S}s"}
        if link.seq is not None:
            query["after"] = str(link.seq)
        limits = link.limits
        raw = await self._call(link, "GET", "/v1/status", limits.bytes, query=query)
        async with self._turn:
            # Take nothing: this only waits until a debt of earlier answers is paid.
            now_s = self._clock()
            if wait_s := self._seconds.take(link.key, JOB_DECODE_S, 0.0, now_s):
                raise _out_of_share("time to decode its answers", wait_s)
            loop = asyncio.get_running_loop()
            result, spent_s = await loop.run_in_executor(self._thread, _timed, raw, limits)
            self._seconds.spend(link.key, JOB_DECODE_S, spent_s, self._clock())
        if isinstance(result, AnswerError):
            raise result
        return result

    async def _speak(self, link: CoordinatorLink) -> None:
        delay_s = RETRY_S
        while True:
            await link.to_send.wait()
            link.to_send.clear()
            inventory, targets = link.inventory, dict(link.targets)
            if not self._leads():
                # Either this process gets the Lease back, or another one leads and this one ends.
                link.to_send.set()
                await pause(RETRY_MAX_S)
                continue
            try:
                # Send a larger target before the inventory with the new pods. Otherwise the
                # coordinator would drain them as surplus.
                grows = targets.get("replicas", 0) > link.replicas
                if grows:
                    await self._aim(link, targets)
                if inventory is not None:
                    await self._post(link, "/v1/inventory", inventory.body())
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

    async def _aim(self, link: CoordinatorLink, targets: dict[str, Any]) -> None:
        await self._post(link, "/v1/targets", targets)
        if link.targets == targets:
            link.targets = {}

    async def _post(self, link: CoordinatorLink, path: str, body: dict[str, Any]) -> None:
        await self._call(link, "POST", path, REPLY_BYTES, body=body)

    def _unanswered(self, link: CoordinatorLink, error: Exception) -> None:
        unheard = Unheard(_cause(error), _host(link.url), _why(error))
        now_s = self._clock()
        silent_s = now_s - link.answered_s
        lost = not link.away and silent_s >= AWAY_S
        link.away = link.away or lost
        changed = link.unheard is None or link.unheard.cause is not unheard.cause
        link.unheard = unheard
        if isinstance(error, AnswerError):
            self._count_refused(link, error, now_s)
        else:
            self._warn(link, unheard, now_s, silent_s)
        if lost or changed:
            self._missed(link.key, unheard, link.away)

    def _warn(self, link: CoordinatorLink, unheard: Unheard, now_s: float, silent_s: float) -> None:
        # The image of a coordinator that has never answered may still be pulled.
        patience_s = TOLD_S if link.seq is None else AWAY_S
        warned_s = link.warned_s.get(unheard.cause, float("-inf"))
        if silent_s >= patience_s and now_s - warned_s >= SAID_S:
            link.warned_s[unheard.cause] = now_s
            log.warning("the coordinator does not answer: %s", unheard.why, extra=_of(link))

    def _count_refused(self, link: CoordinatorLink, error: AnswerError, now_s: float) -> None:
        self._metrics.answers_refused.labels(error.refused).inc()
        refusals = self._refused.setdefault(link.key[0], AnswerRefusals())
        refusals.unsaid += 1
        if now_s - refusals.said_s >= SAID_S:
            log.warning(
                "an answer of the coordinator at %s was refused (%s): %s; %d such answers in "
                "namespace %s since the last line like this",
                _host(link.url),
                error.refused,
                _why(error),
                refusals.unsaid,
                link.key[0],
                extra=_of(link),
            )
            self._refused[link.key[0]] = AnswerRefusals(said_s=now_s)

    async def _call(
        self,
        link: CoordinatorLink,
        method: str,
        path: str,
        most: int,
        *,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> bytearray:
        """Send a request and return the body of the answer, of at most `most` bytes."""
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
            length = _announced(response, most)
            longest = link.limits.bytes
            rate = Rate(JOB_ANSWERS.per_s * longest, JOB_ANSWERS.burst * longest)
            if wait_s := self._bytes.take(link.key, rate, length, self._clock()):
                raise _out_of_share("bytes of answers", wait_s)
            async with asyncio.timeout(REPLY_S):
                return await _read(response, length)


class OneAnswer(ResponseHandler):
    """A connection that accepts one answer to each request.

    HTTP lets a server send any number of interim answers (1xx) before the answer, and unrequested
    answers after it. aiohttp would keep each in memory until the connection is used again.
    """

    _taken = True

    def set_response_params(self, **params: Any) -> None:
        """Expect one answer; aiohttp calls this when it sends a request."""
        self._taken = False
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Accept the head of an answer if one is expected; otherwise abort the connection."""
        if not self._taken and data[0].code >= HTTPStatus.OK:
            self._taken = True
            super().feed_data(data, size)
            return
        self.set_exception(
            AnswerError(RefusedAnswer.FORM, "it sends answers that nobody asked for")
        )
        if self.transport is not None:
            self.transport.abort()


class Connector(aiohttp.TCPConnector):
    """A connector whose connections are `OneAnswer`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        loop = asyncio.get_running_loop()

        def made() -> ResponseHandler:
            return OneAnswer(loop)

        self._factory = partial(made)


@dataclass(slots=True)
class AnswerRefusals:
    """Refused answers of one namespace, for the log."""

    said_s: float = float("-inf")
    """Time of the last log line."""
    unsaid: int = 0
    """Number of refused answers since that line."""


def _announced(response: aiohttp.ClientResponse, most: int) -> int:
    """Return the length of the body, if it may be read.

    Args:
        response: The answer without its body.
        most: Upper bound on the length.

    Returns:
        The length in bytes.

    Raises:
        AnswerError: The answer is not a success, is compressed, has no length, or is too long.
    """
    if response.status != HTTPStatus.OK:
        raise AnswerError(RefusedAnswer.FORM, f"it answers with status {response.status}")
    if "Content-Encoding" in response.headers:
        raise AnswerError(RefusedAnswer.FORM, "it answers compressed, which nobody has asked for")
    length = response.content_length
    if length is None:
        raise AnswerError(
            RefusedAnswer.FORM, "it does not say how long its answer is (Content-Length)"
        )
    if length > most:
        text = f"its answer has {length} bytes, {most} are allowed for the job's pods"
        raise AnswerError(RefusedAnswer.LENGTH, text)
    return length


async def _read(response: aiohttp.ClientResponse, length: int) -> bytearray:
    """Read the body, which ends at its announced length."""
    raw = bytearray()
    async for chunk in response.content.iter_chunked(min(READ_BYTES, max(1, length))):
        raw += chunk
    return raw


def _timed(raw: bytearray, limits: StatusLimits) -> tuple[Status | AnswerError, float]:
    """Return the status, or why it is refused, and the CPU seconds that this thread took."""
    began_s = time.thread_time()
    result: Status | AnswerError
    try:
        result = read_coordinator_status(raw, limits)
    except AnswerError as error:
        result = error
    return result, time.thread_time() - began_s


def _out_of_share(what: str, wait_s: float) -> AnswerError:
    text = f"this job, or all jobs of its namespace, have used up their share of {what}"
    return AnswerError(RefusedAnswer.SHARE, text, retry_s=wait_s)


def _of(link: CoordinatorLink) -> dict[str, str]:
    return {"job": "/".join(link.key)}


def _host(url: str) -> str:
    return url.partition("://")[2]


def _cause(error: Exception) -> UnreachableCause:
    if isinstance(error, AnswerError):
        return (
            UnreachableCause.SHARE
            if error.refused is RefusedAnswer.SHARE
            else UnreachableCause.ANSWER
        )
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return UnreachableCause.TLS
    if isinstance(error, TimeoutError):
        return UnreachableCause.TIMEOUT
    if isinstance(error, aiohttp.ClientResponseError) and error.status == HTTPStatus.UNAUTHORIZED:
        return UnreachableCause.TOKEN
    below = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return (
        UnreachableCause.REFUSED
        if isinstance(below, ConnectionRefusedError)
        else UnreachableCause.OTHER
    )


def _why(error: Exception) -> str:
    """Return the error as text for logs and terminals, without control characters."""
    text = str(error) if isinstance(error, AnswerError) else f"{type(error).__name__}: {error}"
    return printable(text[:DETAIL_MAX])[:DETAIL_MAX]
