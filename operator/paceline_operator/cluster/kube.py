"""The API server over HTTP: `cluster.api.Api` for real, and the stream of a watch.

Thin on purpose: one session, one time limit per request, every answer counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec

from paceline_operator.cluster.api import MANAGER, PATHS, ApiError
from paceline_operator.cluster.credentials import Credentials
from paceline_operator.cluster.rights import asked, words_of
from paceline_operator.metrics import Metrics

REQUEST_S: Final = 15.0
CONNECT_S: Final = 5.0
CONNECTIONS: Final = 64
APPLY: Final = "application/apply-patch+yaml"


class Kube:
    def __init__(self, credentials: Credentials, metrics: Metrics) -> None:
        self.credentials = credentials
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONNECTIONS, ssl=self.credentials.tls if self.credentials.tls else True
            ),
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
        self, kind: str, namespace: str, manifest: Mapping[str, Any], *, strict: bool = False
    ) -> Mapping[str, Any]:
        query = {"fieldManager": MANAGER}
        if strict:
            query["fieldValidation"] = "Strict"
        return await self.request("POST", path(kind, namespace), query=query, body=manifest)

    async def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any]:
        return await self.request("GET", path(kind, namespace, name))

    async def namespaces_of(self, kind: str, name: str, *, within: str) -> list[str]:
        # Asked for by its name alone, so that a right on this name is enough.
        query = {"fieldSelector": f"metadata.name={name}"}
        found = await self.request("GET", path(kind, within), query=query)
        return [item["metadata"]["namespace"] for item in found.get("items") or ()]

    async def delete(
        self, kind: str, namespace: str, name: str, *, uid: str = ""
    ) -> Mapping[str, Any]:
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        options["propagationPolicy"] = "Background"
        if uid:
            options["preconditions"] = {"uid": uid}
        return await self.request("DELETE", path(kind, namespace, name), body=options)

    async def apply(
        self, kind: str, namespace: str, manifest: Mapping[str, Any], *, subresource: str = ""
    ) -> Mapping[str, Any]:
        target = path(kind, namespace, manifest["metadata"]["name"], subresource)
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self.request("PATCH", target, query=query, body=manifest, content=APPLY)

    async def replace(
        self, kind: str, namespace: str, manifest: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """PUT; refused if its resourceVersion is not the present one."""
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
        assert self._session is not None, "use the client within `async with`"
        data = msgspec.json.encode(body) if body is not None else None
        code = "<error>"
        try:
            headers = self.credentials.headers()  # its file may be away for a moment
            if body is not None:
                headers["Content-Type"] = content
            async with self._session.request(
                method,
                self.credentials.server + target,
                params=dict(query or {}),
                headers=headers,
                data=data,
            ) as response:
                code = str(response.status)
                raw = await response.read()
                if response.status >= 400:
                    raise _error(response, raw, asked(method, target))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, "Unreachable", f"{type(error).__name__}: {error}") from None
        finally:
            self._metrics.requests.labels(code, method).inc()
        found = msgspec.json.decode(raw) if raw else {}
        return found if isinstance(found, dict) else {}

    @asynccontextmanager
    async def stream(
        self, target: str, query: Mapping[str, str], *, silence_s: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """The open answer of a watch. Raises TimeoutError after so much silence."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        async with self._session.get(
            self.credentials.server + target,
            params=dict(query),
            headers=self.credentials.headers(),
            timeout=timeout,
        ) as response:
            self._metrics.requests.labels(str(response.status), "WATCH").inc()
            if response.status >= 400:
                what = asked("GET", target, watch="watch" in query)
                raise _error(response, await response.read(), what)
            yield response.content


def path(kind: str, namespace: str, name: str = "", subresource: str = "") -> str:
    """`namespace`: empty for all."""
    found = PATHS[kind] if namespace else PATHS[kind].replace("/namespaces/{namespace}", "")
    found = found.format(namespace=namespace)
    return "/".join(part for part in (found, name, subresource) if part)


def _error(response: aiohttp.ClientResponse, raw: bytes, what: str) -> ApiError:
    reason, message = words_of(raw)
    reason = reason or response.reason or ""
    after = response.headers.get("Retry-After", "")
    after_s = float(after) if after.isdecimal() else 0.0
    denied = what if response.status == HTTPStatus.FORBIDDEN else ""
    return ApiError(response.status, reason, message, after_s, denied=denied)


async def pause(seconds: float) -> None:
    """The one place where a driver waits for time to pass."""
    await asyncio.sleep(seconds)
