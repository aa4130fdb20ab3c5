"""The API server over HTTP: the real `cluster.api.Api`, and the stream of a watch.

It is thin on purpose: one session, one time limit per request, every answer counted. If a login is
refused, it is renewed and the request is sent once more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec
from paceline_api.access.access import Access
from paceline_api.access.errors import AccessError
from paceline_api.access.login import Login

from paceline_operator.cluster.api import MANAGER, PATHS, ApiError
from paceline_operator.cluster.rights import asked, words_of
from paceline_operator.core.shares import Bucket, Rate
from paceline_operator.metrics import OperatorMetrics

REQUEST_S: Final = 15.0
"""Timeout of a request, in seconds."""
CONNECT_S: Final = 5.0
"""Timeout of a connection attempt, in seconds."""
CONNECTIONS: Final = 64
"""Upper bound on the number of open connections."""
WARNINGS_COUNT: Final = 20
"""Upper bound on the number of Events of a pod that are read."""
WARNINGS_MAX: Final = 256 * 1024
"""Upper bound on their bytes. Users may write Events of any content."""
APPLY: Final = "application/apply-patch+yaml"
"""Content type of server-side apply; JSON is valid YAML."""


class Kube:
    """Client of the API server; use it within `async with`, on one event loop.

    All requests raise ApiError if the answer is not a success, or if there was no answer (code 0).
    """

    def __init__(self, access: Access, metrics: OperatorMetrics, rate: Rate | None = None) -> None:
        """Prepare the client.

        Args:
            access: Source of logins.
            metrics: Counters of requests.
            rate: Limit of all requests but watches; None for no limit. Those above it wait, in the
                order in which they came.
        """
        self._access = access
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None
        self._bucket = None if rate is None else Bucket(rate, rate.burst, time.monotonic())

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S),
            headers={"User-Agent": MANAGER},
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def create(
        self,
        kind: str,
        namespace: str,
        manifest: Mapping[str, Any],
        *,
        strict: bool = False,
        dry_run: bool = False,
    ) -> Mapping[str, Any]:
        """Create an object by POST and return it; if `strict`, an unknown field is an error."""
        query = {"fieldManager": MANAGER, **_dry(dry_run)}
        if strict:
            query["fieldValidation"] = "Strict"
        return await self.request("POST", path(kind, namespace), query=query, body=manifest)

    async def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any]:
        """Return one object."""
        return await self.request("GET", path(kind, namespace, name))

    async def warnings_of(self, namespace: str, uid: str) -> bytes:
        """Return a list of warnings about an object as JSON, cut off at WARNINGS_MAX bytes."""
        query = {
            "fieldSelector": f"involvedObject.uid={uid},type=Warning",
            "limit": str(WARNINGS_COUNT),
        }
        raw = b""
        async with self.stream(path("events", namespace), query, silence_s=REQUEST_S) as stream:
            while len(raw) < WARNINGS_MAX and (more := await stream.read(WARNINGS_MAX - len(raw))):
                raw += more
        return raw

    async def namespaces_of(self, kind: str, name: str, *, within: str) -> list[str]:
        """Return the namespaces, within one or in all, that have an object of this name."""
        # Select by name alone, so that a right to this name is enough.
        query = {"fieldSelector": f"metadata.name={name}"}
        answer = await self.request("GET", path(kind, within), query=query)
        return [item["metadata"]["namespace"] for item in answer.get("items") or ()]

    async def delete(
        self, kind: str, namespace: str, name: str, *, uid: str = ""
    ) -> Mapping[str, Any]:
        """Delete an object, its dependents in the background; with `uid`, only that very object."""
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        options["propagationPolicy"] = "Background"
        if uid:
            options["preconditions"] = {"uid": uid}
        return await self.request("DELETE", path(kind, namespace, name), body=options)

    async def apply(
        self,
        kind: str,
        namespace: str,
        manifest: Mapping[str, Any],
        *,
        force: bool,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Mapping[str, Any]:
        """Create or change an object by server-side apply, and return it."""
        target = path(kind, namespace, manifest["metadata"]["name"], subresource)
        query = {"fieldManager": MANAGER, "force": "true" if force else "false", **_dry(dry_run)}
        return await self.request("PATCH", target, query=query, body=manifest, content=APPLY)

    async def replace(
        self, kind: str, namespace: str, manifest: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Replace an object by PUT; refused unless its resourceVersion is the current one."""
        return await self.request(
            "PUT", path(kind, namespace, manifest["metadata"]["name"]), body=manifest
        )

    async def request(
        self,
        method: str,
        target: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> Mapping[str, Any]:
        """Send a request, with `body` as JSON, and return the JSON object of the answer, if any."""
        await self._wait_for_turn()
        data = msgspec.json.encode(body) if body is not None else None
        code = "<error>"
        try:
            headers = [("Content-Type", content)] if body is not None else []
            async with self._answer(
                method, target, headers, params=dict(query or {}), data=data
            ) as response:
                code = str(response.status)
                raw = await response.read()
                if response.status >= 400:
                    raise _error(response, raw, asked(method, target))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, "Unreachable", f"{type(error).__name__}: {error}") from None
        finally:
            self._metrics.requests.labels(code, method).inc()
        decoded = msgspec.json.decode(raw) if raw else {}
        return decoded if isinstance(decoded, dict) else {}

    async def _wait_for_turn(self) -> None:
        if self._bucket is None:
            return
        self._bucket.fill(self._bucket.rate, time.monotonic())
        # Requests that wait have taken their part already: the bucket is in debt for them.
        self._bucket.level -= 1.0
        wait_s = max(0.0, -self._bucket.level / self._bucket.rate.per_s)
        if wait_s:
            self._metrics.throttled.inc(wait_s)
            await pause(wait_s)

    @asynccontextmanager
    async def stream(
        self, target: str, query: Mapping[str, str], *, silence_s: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Open a watch or a list and yield its body; reading times out after `silence_s`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        async with self._answer("GET", target, params=dict(query), timeout=timeout) as response:
            self._metrics.requests.labels(str(response.status), "WATCH").inc()
            if response.status >= 400:
                what = asked("GET", target, watch="watch" in query)
                raise _error(response, await response.read(), what)
            yield response.content

    @asynccontextmanager
    async def _answer(
        self, method: str, target: str, headers: Iterable[tuple[str, str]] = (), **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; if the login is refused and can be renewed, send it once more.

        Args:
            method: HTTP method.
            target: Path on the API server.
            headers: Headers besides those of the login.
            **more: Further arguments of `aiohttp.ClientSession.request`.

        Yields:
            The last answer.
        """
        assert self._session is not None, "use the client within `async with`"
        login = self._access.login
        for last in (False, True):
            async with self._session.request(
                method,
                login.server + target,
                headers=[*login.headers(), *headers],  # OSError if the token's file is away
                ssl=login.tls if login.tls is not None else True,
                server_hostname=login.server_name,
                proxy=login.proxy,
                **more,
            ) as response:
                refused = response.status == HTTPStatus.UNAUTHORIZED
                if last or not refused or not await renewed(self._access, login):
                    yield response
                    return
            login = self._access.login


async def renewed(access: Access, refused: Login) -> bool:
    """Renew a login that was refused.

    Args:
        access: Source of logins.
        refused: The login that the API server has refused.

    Returns:
        True if there is a newer login.

    Raises:
        ApiError: No login can be obtained.
    """
    try:
        return await asyncio.to_thread(access.refresh, refused)
    except AccessError as error:
        message = f"{error.message}; {error.hint}"
        raise ApiError(HTTPStatus.UNAUTHORIZED, "Unauthorized", message) from None


def _dry(run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if run else {}


def path(kind: str, namespace: str, name: str = "", subresource: str = "") -> str:
    """Return the path of a collection, an object or a subresource; empty namespace: all."""
    collection = PATHS[kind] if namespace else PATHS[kind].replace("/namespaces/{namespace}", "")
    collection = collection.format(namespace=namespace)
    return "/".join(part for part in (collection, name, subresource) if part)


def _error(response: aiohttp.ClientResponse, raw: bytes, what: str) -> ApiError:
    reason, message = words_of(raw)
    reason = reason or response.reason or ""
    after = response.headers.get("Retry-After", "")
    after_s = float(after) if after.isdecimal() else 0.0
    denied = what if response.status == HTTPStatus.FORBIDDEN else ""
    return ApiError(response.status, reason, message, after_s, denied=denied)


async def pause(seconds: float) -> None:
    """Sleep; drivers call this instead of `asyncio.sleep`."""
    await asyncio.sleep(seconds)
