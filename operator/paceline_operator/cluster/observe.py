"""The watches of pods and nodes, one each for the whole scope of the operator.

A watch can die without a word: its connection is cut by a proxy, or the server stops sending. The
server sends a bookmark about once a minute, so a longer silence ends the connection, and the watch
goes on from the last version, or from a new list if that version is too old (410).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import aiohttp
import msgspec
from msgspec import Struct
from paceline_api.decoding import UNDECODABLE
from paceline_api.names import LABEL_MANAGER, manager_label
from paceline_api.types.fabric import FABRIC_PLURAL
from paceline_api.types.job import API_VERSION

from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.kube import Kube, pause
from paceline_operator.cluster.rights import told
from paceline_operator.cluster.store import Store
from paceline_operator.cluster.wire import (
    FabricObject,
    NodeObject,
    PodObject,
    fabric_from,
    node_of,
    pod_of,
)
from paceline_operator.metrics import Metrics

log = logging.getLogger("paceline.operator")

SILENCE_S: Final = 100.0
"""Bookmarks come about every 60 s."""
SERVER_S: Final = 3000
"""The server ends a watch itself after so long."""
PAGE: Final = 500
RETRY_S: Final = 0.2
RETRY_MAX_S: Final = 15.0
BREAK_S: Final = RETRY_MAX_S + 5
"""A connection that is away for less is no outage: proxies cut connections regularly."""

Item = TypeVar("Item", PodObject, NodeObject, FabricObject)
T = TypeVar("T")


class Listed(Struct, Generic[Item]):
    items: list[Item]
    metadata: dict[str, Any] = {}


class Happened(Struct, Generic[Item]):
    type: str
    object: Item


class Failed(Struct, frozen=True):
    code: int = 0
    message: str = ""


class Trouble(Struct, frozen=True):
    type: str
    object: Failed = Failed()


_TROUBLE: Final = msgspec.json.Decoder(Trouble)


@dataclass(slots=True)
class Source(Generic[Item]):
    """One kind of object, and where it goes."""

    kind: str
    path: str
    selector: str
    page: msgspec.json.Decoder[Listed[Item]]
    event: msgspec.json.Decoder[Happened[Item]]
    listed: Callable[[list[Item]], None]
    put: Callable[[Item], None]
    drop: Callable[[Item], None]
    version: str = ""
    """Where the watch goes on; empty: with a list."""
    heard_s: float = 0.0
    live_s: float = 0.0
    """Since when it has been followed without an outage."""
    lost_s: float | None = None
    """Since when the connection has been away; None: it is not."""
    synced: bool = False
    denied: str = ""
    """What the operator has no right to; empty once it was let."""
    optional: bool = False
    """The API server may not know this kind, or not show it: then there are none."""


class Watch(Generic[Item]):
    def __init__(
        self, kube: Kube, source: Source[Item], clock: Callable[[], float], metrics: Metrics
    ) -> None:
        self._kube, self._clock, self._metrics = kube, clock, metrics
        self.source: Source[Item] = source
        self._asked_s: float | None = None
        """When the request was made that has no answer yet."""

    @property
    def kind(self) -> str:
        return self.source.kind

    @property
    def age_s(self) -> float:
        """Since its last sign of life."""
        return self._clock() - self.source.heard_s if self.source.heard_s else 0.0

    @property
    def denied(self) -> str:
        return self.source.denied

    @property
    def fresh(self) -> bool:
        return self.source.synced and self.age_s < SILENCE_S + 20

    @property
    def live_since_s(self) -> float | None:
        """Since when it has shown how things are, without an outage; None: it does not now."""
        return self.source.live_s if self.source.synced and self.source.lost_s is None else None

    def _lose(self, since_s: float) -> None:
        """The connection is away. `since_s`: the last moment at which it may have been there."""
        if self.source.lost_s is None:
            self.source.lost_s = since_s

    def _failed_s(self) -> float:
        """Since when the connection may have been away if it has just failed."""
        return self._clock() if self._asked_s is None else self._asked_s

    def _regain(self) -> None:
        """The API server answers a list or a watch."""
        source, now_s = self.source, self._clock()
        self._asked_s = None
        if not source.live_s or (source.lost_s is not None and now_s - source.lost_s >= BREAK_S):
            source.live_s = now_s
        source.heard_s, source.lost_s = now_s, None

    async def run(self) -> None:
        """For ever. Whatever goes wrong begins the watch anew."""
        delay_s = RETRY_S
        while True:
            cause = "ended"
            self._asked_s = self._clock()
            try:
                if not self.source.version:
                    await self._list()
                await self._follow()
                delay_s = RETRY_S
            except ApiError as error:
                cause = str(error.code or error.reason)
                if error.code == 410:
                    self.source.version, delay_s = "", RETRY_S
                else:
                    self._lose(self._failed_s())
                    self.source.version = "" if error.code else self.source.version
                missing = self.source.optional and error.code in (403, 404)
                if missing:
                    self._none()
                else:
                    self.source.denied = error.denied
                log.log(
                    logging.INFO if missing or error.code == 410 else logging.WARNING,
                    "watch of %s: %s",
                    self.source.kind,
                    error if missing else told(error),
                )
            except (TimeoutError, aiohttp.SocketTimeoutError):
                cause = "silent"
                self._lose(self.source.heard_s)
                log.warning("watch of %s was silent for %g s", self.source.kind, SILENCE_S)
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
                cause = type(error).__name__
                self._lose(self._failed_s())
                log.warning("watch of %s: %s: %s", self.source.kind, cause, error)
            self._metrics.watch_restarts.labels(self.source.kind, cause).inc()
            await pause(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _list(self) -> None:
        """Everything, in pages, as of one version."""
        query = {"limit": str(PAGE), "labelSelector": self.source.selector}
        items: list[Item] = []
        token = ""
        while True:
            asked = query | ({"continue": token} if token else {})
            async with self._kube.stream(self.source.path, asked, silence_s=30.0) as stream:
                page = self.read_page(await stream.read())
            items += page.items
            token = str(page.metadata.get("continue") or "")
            if not token:
                break
        self.source.listed(items)
        self.source.version = str(page.metadata.get("resourceVersion") or "")
        self.source.synced = True
        self._regain()

    def _none(self) -> None:
        self.source.listed([])
        self.source.synced = True
        self._regain()

    async def _follow(self) -> None:
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self.source.version,
            "timeoutSeconds": str(SERVER_S),
            "labelSelector": self.source.selector,
        }
        async with self._kube.stream(self.source.path, query, silence_s=SILENCE_S) as stream:
            self._regain()
            self.source.denied = ""
            async for line in _lines(stream):
                self.source.heard_s = self._clock()
                self.take(line)

    def read_page(self, raw: bytes) -> Listed[Item]:
        """Return a page of a list. Raises msgspec.MsgspecError."""
        return _decoded(self.source.page, raw)

    def take(self, line: bytes) -> None:
        """Put what a line of the watch says into the store.

        Raises:
            ApiError: The line is an error of the API server.
            msgspec.MsgspecError: The line is no event of this kind of object.
        """
        if line.startswith(b'{"type":"ERROR"'):
            failed = _decoded(_TROUBLE, line).object
            raise ApiError(failed.code or 500, "WatchError", failed.message)
        event = _decoded(self.source.event, line)
        self.source.version = event.object.metadata.resource_version or self.source.version
        if event.type == "BOOKMARK":
            return
        self._metrics.events.labels(self.source.kind).inc()
        if event.type == "DELETED":
            self.source.drop(event.object)
        else:
            self.source.put(event.object)


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    """What a pod's author may write without being asked is nested as deep as it may be."""
    try:
        return decoder.decode(raw)
    except UNDECODABLE as error:
        raise msgspec.DecodeError(str(error)) from None


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Objects may be larger than the reader's own limit for a line."""
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
        await asyncio.sleep(0)  # a burst must not hold up the decisions


def pod_source(store: Store, clock: Callable[[], float], namespace: str) -> Source[PodObject]:
    """Of the jobs of this operator. `namespace`: empty for all."""

    def put(item: PodObject) -> None:
        if found := pod_of(item, clock()):
            store.put_pod((found[0], found[1]), found[2])

    def drop(item: PodObject) -> None:
        if found := pod_of(item, clock()):
            store.drop_pod((found[0], found[1]), found[2].name, found[2].uid)

    def listed(items: list[PodObject]) -> None:
        now_s = clock()
        pods = (pod_of(item, now_s) for item in items)
        store.keep_pods(((f[0], f[1]), f[2]) for f in pods if f is not None)

    within = f"/namespaces/{namespace}" if namespace else ""
    return Source(
        kind="pods",
        path=f"/api/v1{within}/pods",
        selector=f"{LABEL_MANAGER}={manager_label(store.manager)}",
        page=msgspec.json.Decoder(Listed[PodObject]),
        event=msgspec.json.Decoder(Happened[PodObject]),
        listed=listed,
        put=put,
        drop=drop,
    )


def _all_of(
    known: Mapping[str, Any], put: Callable[[Item], None], drop: Callable[[str], None]
) -> Callable[[list[Item]], None]:
    """For a complete list of objects that are known by name: what it lacks is gone."""

    def listed(items: list[Item]) -> None:
        for gone in set(known) - {item.metadata.name for item in items}:
            drop(gone)
        for item in items:
            put(item)

    return listed


def node_source(store: Store, clock: Callable[[], float]) -> Source[NodeObject]:
    def put(item: NodeObject) -> None:
        store.put_node(node_of(item, store.nodes.get(item.metadata.name), clock()))

    return Source(
        kind="nodes",
        path="/api/v1/nodes",
        selector="",
        page=msgspec.json.Decoder(Listed[NodeObject]),
        event=msgspec.json.Decoder(Happened[NodeObject]),
        listed=_all_of(store.nodes, put, store.drop_node),
        put=put,
        drop=lambda item: store.drop_node(item.metadata.name),
    )


def fabric_source(store: Store) -> Source[FabricObject]:
    def put(item: FabricObject) -> None:
        found = fabric_from(item)
        if isinstance(found, str):
            log.warning("FabricProfile %s is left out: %s", item.metadata.name, found)
            store.drop_fabric(item.metadata.name)
        else:
            store.put_fabric(item.metadata.name, found)

    return Source(
        kind=FABRIC_PLURAL,
        path=f"/apis/{API_VERSION}/{FABRIC_PLURAL}",
        selector="",
        page=msgspec.json.Decoder(Listed[FabricObject]),
        event=msgspec.json.Decoder(Happened[FabricObject]),
        listed=_all_of(store.fabrics, put, store.drop_fabric),
        put=put,
        drop=lambda item: store.drop_fabric(item.metadata.name),
        optional=True,
    )
