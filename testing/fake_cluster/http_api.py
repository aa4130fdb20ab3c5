"""The API server in memory (testing.fake_cluster.server) over HTTP, with lists and watches.

Its faults are those of a real server that is busy, restarted or behind a bad network: an answer
that is late or lost, a watch that ends, stalls or begins too far in the past (410), a burst that is
held back. A watch keeps its order. Two watches, or a watch and the answers to requests, have no
common order.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from aiohttp import web
from paceline_api.crdgen import PLURAL
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.fabric import FABRIC_PLURAL
from paceline_api.types.job import GROUP, VERSION
from paceline_api.types.runtime import PLURALS
from paceline_operator.cluster.api import ApiError

from testing.fake_cluster.server import CrashError, Server
from testing.fake_cluster.virtual import VirtualLoop

PATH: Final = re.compile(
    r"(?:/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+))?(?:/([^/]+))?"
)
BOOKMARK_S: Final = 60.0


def _resources(*kinds: tuple[str, str, bool]) -> dict[str, Any]:
    verbs = ["get", "list", "watch", "create", "patch", "delete"]
    return {
        "resources": [
            {
                "name": name,
                "kind": kind,
                "singularName": kind.lower(),
                "namespaced": namespaced,
                "verbs": verbs,
            }
            for name, kind, namespaced in kinds
        ]
    }


SERVED: Final = {"version": VERSION}
DISCOVERY: Final[dict[str, Any]] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": _resources(("namespaces", "Namespace", False), ("events", "Event", True)),
    "/apis": {"groups": [{"name": GROUP, "versions": [SERVED], "preferredVersion": SERVED}]},
    f"/apis/{GROUP}/{VERSION}": _resources(
        (PLURAL, "TrainingJob", True),
        (FABRIC_PLURAL, "FabricProfile", False),
        *((PLURALS[kind], str(kind), kind is RuntimeKind.NAMESPACED) for kind in RuntimeKind),
    ),
}


@dataclass
class Stream:
    """One open watch."""

    kind: str
    at: int
    """Position in the server's log."""
    bookmark_s: float | None
    """Time at which the next bookmark is due; None if the client requested no bookmarks."""
    silent: bool = False
    """True if the connection stands but nothing comes through any more."""
    news: asyncio.Event = field(default_factory=asyncio.Event)


class HttpApi:
    """Request handler of the API server, independent of the listener.

    `crashed` is called when a request hits the crash that `Server.crash_in` scheduled for the
    client.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, server: Server, crashed: Callable[[], None]
    ) -> None:
        self._loop, self._server, self._crashed = loop, server, crashed
        server.watchers.append(self._wake)
        self.web = web.Server(self._answer, loop=loop, access_log=None)
        self.streams: list[Stream] = []
        self.held: set[str] = set()
        """Kinds whose watches are held back."""
        self.oldest = 0
        """Version before which no watch can begin."""
        self.gone_in_stream = False
        """How a watch learns that it is too old: by an event if True, else by the HTTP status."""
        self.busy = 0
        """Number of further requests that are answered with 429."""
        self.late = self.lost = 0
        """`late`, `lost`: numbers of further requests that are carried out and answered late or not
        at all."""
        self.late_s = 0.0

    def hold(self, kind: str, held: bool) -> None:
        """Hold back the watches of a kind, or let them go on."""
        (self.held.add if held else self.held.discard)(kind)
        self._wake()

    def silence(self, kind: str) -> None:
        """Stall all open watches of a kind for good."""
        for stream in self.streams:
            stream.silent |= stream.kind == kind

    def forget(self) -> None:
        """Discard old versions: open watches go on, those that resume must list again."""
        self.oldest = self._server.version

    def _wake(self) -> None:
        for stream in self.streams:
            stream.news.set()

    # ---- requests -------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in DISCOVERY:
            return _json(DISCOVERY[request.path])
        if self.busy:
            self.busy -= 1
            return _refused(ApiError(429, "TooManyRequests", "slow down"), {"Retry-After": "1"})
        match = PATH.fullmatch(request.path)
        assert match is not None, request.path
        namespace, kind, name, part = match.groups()
        try:
            if request.method == "GET" and not name:
                return await self._collection(request, kind, namespace)
            done = await self._do(request, kind, namespace or "", name, part or "")
        except ApiError as error:
            return _refused(error, {})
        except CrashError:
            self._server.crash_in = None
            self._crashed()
            return web.Response(status=503)  # the client is gone
        if self.late:
            self.late -= 1
            await asyncio.sleep(self.late_s)
        if self.lost:
            self.lost -= 1
            assert request.transport is not None
            request.transport.abort()
        return _json(done, 201 if request.method == "POST" else 200)

    async def _do(
        self, request: web.BaseRequest, kind: str, namespace: str, name: str, part: str
    ) -> Any:
        raw = await request.read()
        body = msgspec.json.decode(raw) if raw else {}
        server = self._server
        match request.method:
            case "GET":
                return await server.get(kind, namespace, name)
            case "POST":
                strict = request.query.get("fieldValidation") == "Strict"
                dry_run = request.query.get("dryRun") == "All"
                return await server.create(kind, namespace, body, strict=strict, dry_run=dry_run)
            case "PUT":
                return await server.replace(kind, namespace, body)
            case "PATCH":
                force = request.query.get("force") == "true"
                dry_run = request.query.get("dryRun") == "All"
                return await server.apply(
                    kind, namespace, body, force=force, subresource=part, dry_run=dry_run
                )
            case "DELETE":
                uid = body.get("preconditions", {}).get("uid", "")
                return await server.delete(kind, namespace, name, uid=uid)
        raise AssertionError(request.method)

    # ---- lists and watches ----------------------------------------------------------------------

    async def _collection(
        self, request: web.BaseRequest, kind: str, namespace: str | None
    ) -> web.StreamResponse:
        if kind in self._server.refusing:
            raise self._server.refusing[kind]
        label, equals, value = request.query.get("labelSelector", "").partition("=")

        def wanted(body: dict[str, Any]) -> bool:
            metadata = body["metadata"]
            here = not namespace or metadata["namespace"] == namespace
            labels = metadata.get("labels", {})
            fits = labels.get(label) == value if equals else label in labels
            return here and (not label or fits)

        if request.query.get("watch"):
            return await self._watch(request, kind, wanted)
        items = [body for body in self._server.of_kind(kind) if wanted(body)]
        metadata = {"resourceVersion": str(self._server.version)}
        return _json({"kind": "List", "metadata": metadata, "items": items})

    async def _watch(
        self, request: web.BaseRequest, kind: str, wanted: Callable[[dict[str, Any]], bool]
    ) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        too_old = since < self.oldest
        if too_old and not self.gone_in_stream:
            raise ApiError(410, "Expired", f"too old resource version: {since}")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if too_old:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await response.write(_line("ERROR", status))
            return response
        at = next((n for n, entry in enumerate(self._server.log) if _version(entry) > since), None)
        here = len(self._server.log) if at is None else at
        marked = request.query.get("allowWatchBookmarks") == "true"
        due_s = self._loop.time() + BOOKMARK_S if marked else None
        stream = Stream(kind, here, due_s)
        self.streams.append(stream)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    await self._follow(stream, response, wanted)
        except TimeoutError:
            return response  # the client begins the next one
        except ConnectionError:
            return response  # it was cut
        finally:
            self.streams.remove(stream)

    async def _follow(
        self, stream: Stream, response: web.StreamResponse, wanted: Callable[[dict[str, Any]], bool]
    ) -> None:
        """Send everything that is new, or a bookmark after a minute without news."""
        log = self._server.log
        stream.news.clear()
        while stream.at < len(log) and not stream.silent and stream.kind not in self.held:
            kind, what, body = log[stream.at]
            stream.at += 1
            if kind == stream.kind and wanted(body):
                await response.write(_line(what, body))
        try:
            async with asyncio.timeout_at(stream.bookmark_s):
                await stream.news.wait()
        except TimeoutError:
            stream.bookmark_s = self._loop.time() + BOOKMARK_S
            if not stream.silent and stream.kind not in self.held:
                metadata = {"resourceVersion": str(_version(log[stream.at - 1]))}
                await response.write(_line("BOOKMARK", {"metadata": metadata}))


class VirtualApi(HttpApi):
    """The handler at an address of the virtual network."""

    def __init__(
        self, loop: VirtualLoop, server: Server, host: str, crashed: Callable[[], None]
    ) -> None:
        super().__init__(loop, server, crashed)
        self._network, self.host = loop.network, host
        self.away(False)

    @property
    def url(self) -> str:
        """URL of the server in the virtual network."""
        return f"http://{self.host}:6443"

    def away(self, away: bool) -> None:
        """Make the server unreachable, as during a restart; it forgets nothing."""
        address = (self.host, 6443)
        if not away and address not in self._network.listeners:
            self._network.listen(address, self.web)
        elif away:
            self._network.listeners.pop(address, None)
            self._network.cut(self.host)


def _version(entry: tuple[str, str, dict[str, Any]]) -> int:
    return int(entry[2]["metadata"]["resourceVersion"])


def _line(what: str, body: Any) -> bytes:
    return msgspec.json.encode({"type": what, "object": body}) + b"\n"


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def _refused(error: ApiError, headers: dict[str, str]) -> web.Response:
    body = {"kind": "Status", "reason": error.reason, "message": error.message, "code": error.code}
    response = _json(body, error.code)
    response.headers.update(headers)
    return response
